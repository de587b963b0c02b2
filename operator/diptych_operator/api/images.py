"""Chooses the images of a service, its own or else the operator's, and the user that they run as.

`parse` returns services whose images are named. So objects, revisions and the status agree on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import msgspec

from diptych_operator.api.service import InferenceService, Spec

REGISTRY = "ghcr.io/diptych-dev"
"""Where releases are published. The chart's `images.registry` is the same; `charts/stamp.py` sets
both."""


def published(component: str) -> str:
    """Return the name of the image that was released with this code."""
    return f"{REGISTRY}/diptych-{component}:{version('diptych')}"


@dataclass(frozen=True, slots=True)
class Images:
    """The images of services that name none themselves."""

    engine: str = published("engine")
    router: str = published("router")
    vllm_connector: str = published("vllm-connector")
    cluster_chooses_user: bool = False
    """Pods name no user and no group, because the cluster assigns them to each namespace (a
    security context constraint of OpenShift)."""


USER_FIELDS = tuple(
    f"spec.securityContext.{name}" for name in ("runAsUser", "runAsGroup", "fsGroup")
)
"""Fields that pods omit where the cluster chooses the user."""


def with_images(service: InferenceService, defaults: Images) -> InferenceService:
    """Return the service with the image of each of its programs named."""
    spec, replace = service.spec, msgspec.structs.replace
    engine = replace(spec.engine, image=spec.engine.image or defaults.engine)
    router = replace(spec.router, image=spec.router.image or defaults.router)
    transfer = spec.transfer
    if spec.engine.runtime == "vllm":
        image = transfer.connector_image or defaults.vllm_connector
        transfer = replace(transfer, connector_image=image)
    spec = replace(spec, engine=engine, router=router, transfer=transfer)
    return replace(service, spec=_without_user(spec) if defaults.cluster_chooses_user else spec)


def _without_user(spec: Spec) -> Spec:
    parts = {
        role: msgspec.structs.replace(
            part, pod_template_remove=[*USER_FIELDS, *part.pod_template_remove]
        )
        for role in ("prefill", "decode", "router")
        if (part := getattr(spec, role)) is not None
    }
    return msgspec.structs.replace(spec, **parts)
