"""Renders one InferenceService into its Kubernetes objects, without I/O, clock or chance.

`diptych up` runs exactly these objects as local processes.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from diptych_operator.api.base import Object, SpecError
from diptych_operator.api.names import ROLES, roles
from diptych_operator.api.pools import Counts, PoolName
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.cluster import SET_API, SET_KIND, Cluster
from diptych_operator.kube.workloads import gathered
from diptych_operator.render.config import router_config_map, serving_config_map
from diptych_operator.render.gateway import gateway_objects
from diptych_operator.render.keys import KeySets, ServiceSecrets, secret
from diptych_operator.render.model import model_mount
from diptych_operator.render.pods import engine_objects, router_deployment
from diptych_operator.render.prefetch import daemon_sets
from diptych_operator.render.shared import (
    disruption_budget,
    network_policy,
    pool_service,
    router_service,
    service_account,
)
from diptych_operator.render.vllm import vllm_objects
from diptych_operator.revision import key_set, revision
from diptych_protocol.router_settings import Serving

__all__ = [
    "KeySets", "NoSetsError", "ServiceSecrets", "render", "render_revision", "render_shared",
]  # fmt: skip


class NoSetsError(SpecError):
    """The spec asks for a DisaggregatedSet, which the cluster lacks."""

    def __init__(self) -> None:
        super().__init__(
            "spec.workload",
            f"the cluster has no {SET_API} {SET_KIND}, or the operator may not watch them; install "
            "LeaderWorkerSet with its CRDs, and wait up to five minutes, or set Deployment",
        )


def render(service: InferenceService, secrets: ServiceSecrets) -> list[Object]:
    """Return all objects of a service at rest, each before those that refer to it.

    Raises `SpecError` for a podTemplate that does not fit the pod it is merged over.
    """
    keys = KeySets(key_set(service))
    return [
        secret(service, keys.current, secrets),
        *render_shared(service, Cluster(), keys, Serving()),
        *render_revision(service, Cluster(), revision(service), keys, fixed_counts(service)),
    ]


def fixed_counts(service: InferenceService) -> Counts:
    """Return the pods that the spec asks for. An autoscaled pool starts at its minimum, but at
    least at one."""
    if service.spec.suspend:
        return Counts(0, 0)
    counts = {
        role: max(1, pool.autoscaling.min_replicas) if pool.autoscaling else pool.replicas or 1
        for role, pool in service.pools.items()
    }
    return Counts(counts.get("prefill", 0), counts["decode"])


def render_shared(
    service: InferenceService, cluster: Cluster, keys: KeySets, serving: Serving
) -> list[Object]:
    """Return the objects that a service has once, for all revisions, except the Secret."""
    model = model_mount(service, "router", cluster_has_image_volumes=cluster.has_image_volumes)
    config = router_config_map(service, model.uri)
    routers = 0 if service.spec.suspend else service.spec.router.replicas
    objects = [
        *(service_account(service, role) for role in roles(service)),
        config,
        serving_config_map(service, serving),
        *(pool_service(service, role) for role in service.pools),
        router_service(service),
    ]
    if service.spec.availability.pod_disruption_budget == "Managed":
        objects += [disruption_budget(service, role, cluster) for role in roles(service)]
    if service.spec.network.policy == "Managed":
        # Also of a pool that the spec has no more: its pods may still be there.
        objects += [network_policy(service, role, cluster) for role in ROLES]
    gateway = service.spec.expose.gateway
    if gateway is not None and cluster.has_gateways:
        objects += gateway_objects(service, gateway)
    if service.spec.model.cache.prefetch:
        pools = {role: _pool(service, cluster, role, "", keys) for role in service.pools}
        objects += daemon_sets(service, pools)
    return [*objects, router_deployment(service, routers, keys, config, model)]


def render_revision(
    service: InferenceService,
    cluster: Cluster,
    name: str,
    keys: KeySets,
    counts: Counts,
    in_place: Collection[str] = (),
) -> list[Object]:
    """Return the pools of the revision that the spec describes. Raises `SpecError`, as `render`.

    in_place: roles whose changed template replaces a pod before there is room for another.
    """
    if service.spec.workload == SET_KIND and not cluster.has_sets:
        raise NoSetsError()
    objects: list[Object] = []
    for role in service.pools:
        asked = _without_surge(service) if role in in_place else service
        objects += _pool(asked, cluster, role, name, keys, counts.of(role))
    ordered = sorted(objects, key=lambda item: item["kind"] == "Deployment")
    return gathered(service, ordered)


def _pool(
    service: InferenceService,
    cluster: Cluster,
    role: PoolName,
    revision: str,
    keys: KeySets,
    count: int = 0,
) -> list[Object]:
    render_pool = vllm_objects if service.spec.engine.runtime == "vllm" else engine_objects
    model = model_mount(service, role, cluster_has_image_volumes=cluster.has_image_volumes)
    return render_pool(service, role, revision, count, keys, model)


def _without_surge(service: InferenceService) -> InferenceService:
    spec = service.spec
    rollout = replace(spec.rollout, max_surge=0, max_unavailable=1)
    return replace(service, spec=replace(spec, rollout=rollout))
