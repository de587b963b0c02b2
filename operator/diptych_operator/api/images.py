"""Chooses the images of a service, its own or else the operator's, and what else of its pods the
operator was installed with.

`parse` returns services whose images are named. So objects, revisions and the status agree on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import msgspec

from diptych_operator.api.base import SpecPart
from diptych_operator.api.merge import merge
from diptych_operator.api.pools import Resources
from diptych_operator.api.route import ModelRoute
from diptych_operator.api.service import InferenceService, Spec

REGISTRY = "ghcr.io/diptych-dev"
"""Where releases are published. The chart's `images.registry` is the same; `charts/stamp.py` sets
both."""


def published(component: str) -> str:
    """Return the name of the image that was released with this code."""
    return f"{REGISTRY}/diptych-{component}:{version('diptych')}"


class PullSecret(SpecPart, frozen=True):
    name: str


class PodDefaults(SpecPart, frozen=True):
    """The chart's `podDefaults`: what pods of services have that say nothing else."""

    image_pull_secrets: list[PullSecret] = []
    service_account_name: str = ""
    priority_class_name: str = ""
    engine_resources: Resources = Resources()
    router_resources: Resources = Resources()

    def pod_template(self) -> dict[str, Any]:
        """What stands in every podTemplate, before the service's own is merged over it."""
        fields = {
            "imagePullSecrets": msgspec.to_builtins(self.image_pull_secrets),
            "serviceAccountName": self.service_account_name,
            "priorityClassName": self.priority_class_name,
        }
        given = {name: value for name, value in fields.items() if value}
        return {"spec": given} if given else {}


@dataclass(frozen=True, slots=True)
class Images:
    """The images of services that name none themselves, and what else their pods have."""

    engine: str = published("engine")
    router: str = published("router")
    vllm_connector: str = published("vllm-connector")
    cluster_chooses_user: bool = False
    """Pods name no user and no group, because the cluster assigns them to each namespace (a
    security context constraint of OpenShift)."""
    pods: PodDefaults = field(default_factory=PodDefaults)


USER_FIELDS = tuple(
    f"spec.securityContext.{name}" for name in ("runAsUser", "runAsGroup", "fsGroup")
)
"""Fields that pods omit where the cluster chooses the user."""


def with_images(service: InferenceService, defaults: Images) -> InferenceService:
    """Return the service with the image of each of its programs named, and the pods' defaults.

    Raises `SpecError` for a podTemplate that cannot be merged over them.
    """
    spec, replace = service.spec, msgspec.structs.replace
    engine = replace(spec.engine, image=spec.engine.image or defaults.engine)
    router = replace(spec.router, image=spec.router.image or defaults.router)
    transfer = spec.transfer
    if spec.engine.runtime == "vllm":
        image = transfer.connector_image or defaults.vllm_connector
        transfer = replace(transfer, connector_image=image)
    spec = replace(spec, engine=engine, router=router, transfer=transfer)
    if defaults.pods != PodDefaults():
        spec = _with_pods(spec, defaults.pods)
    return replace(service, spec=_without_user(spec) if defaults.cluster_chooses_user else spec)


def route_with_images(route: ModelRoute, defaults: Images) -> ModelRoute:
    """Return the route with its image named, and the pods' defaults. Raises as `with_images`."""
    spec = msgspec.structs.replace(route.spec, image=route.spec.image or defaults.router)
    if defaults.pods != PodDefaults():
        spec = _with_defaults(spec, "spec", defaults.pods, defaults.pods.router_resources)
    if defaults.cluster_chooses_user:
        spec = _part_without_user(spec)
    return msgspec.structs.replace(route, spec=spec)


def _with_pods(spec: Spec, defaults: PodDefaults) -> Spec:
    usual = {"router": defaults.router_resources}
    parts = {
        role: _with_defaults(
            part, f"spec.{role}", defaults, usual.get(role, defaults.engine_resources)
        )
        for role, part in _parts(spec).items()
    }
    return msgspec.structs.replace(spec, **parts)


def _with_defaults(part: Any, field: str, defaults: PodDefaults, resources: Resources) -> Any:
    template = part.pod_template
    if base := defaults.pod_template():
        template = merge(base, template, f"{field}.podTemplate")
    resources = resources if part.resources == Resources() else part.resources
    return msgspec.structs.replace(part, pod_template=template, resources=resources)


def _without_user(spec: Spec) -> Spec:
    parts = {role: _part_without_user(part) for role, part in _parts(spec).items()}
    return msgspec.structs.replace(spec, **parts)


def _part_without_user(part: Any) -> Any:
    kept = [*USER_FIELDS, *part.pod_template_remove]
    return msgspec.structs.replace(part, pod_template_remove=kept)


def _parts(spec: Spec) -> dict[str, Any]:
    """The parts that become pods, by role."""
    parts = {role: getattr(spec, role) for role in ("prefill", "decode", "router")}
    return {role: part for role, part in parts.items() if part is not None}
