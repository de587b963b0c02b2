"""Uses kopf to watch resources, to index what it saw, and to report which service has changed.

kopf's handlers for creation and update are not used, because they report edges. Its daemons are not
used, because they put a finalizer on each service, which then cannot be deleted while the operator
is away. Children are deleted by their owner references instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import kopf

from diptych_operator.api.base import Raw, ServiceKey
from diptych_operator.api.names import (
    KEYS_VOLUME,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROUTE_SUFFIX,
    SERVICE_LABEL,
)
from diptych_operator.api.route import ROUTE_KIND, ROUTE_PLURAL
from diptych_operator.api.scaler import SCALER_KIND, SCALER_PLURAL
from diptych_operator.api.service import GROUP, KIND, VERSION
from diptych_operator.kube.client import PLURALS
from diptych_operator.kube.cluster import (
    HTTP_ROUTE_API,
    HTTP_ROUTE_KIND,
    POOL_API,
    POOL_KIND,
    SET_API,
    SET_KIND,
    Cluster,
)
from diptych_operator.kube.liveness import WATCH_TURN_S
from diptych_operator.kube.workloads import WORKLOADS

Index = Mapping[ServiceKey, Collection[Raw]]

SERVICES, ROUTES, PODS = "services", "routes", "pods"
_POD_KIND = ("", "v1", "pods")


class Indexed:
    """The indices that the reconciler reads. They are empty until kopf has filled them."""

    def __init__(self) -> None:
        self._indices: dict[str, Index] = {}

    def adopt(self, indices: Mapping[str, Index]) -> None:
        """Take the live indices out of a handler's arguments."""
        known = (SERVICES, ROUTES, *_child_indices(), PODS)
        self._indices = {name: indices[name] for name in known if name in indices}

    def service(self, key: ServiceKey) -> Raw | None:
        return next(iter(self._indices.get(SERVICES, {}).get(key, ())), None)

    def route(self, key: ServiceKey) -> Raw | None:
        return next(iter(self._indices.get(ROUTES, {}).get(key, ())), None)

    def service_keys(self) -> set[ServiceKey]:
        return set(self._indices.get(SERVICES, {}))

    def children(self, key: ServiceKey) -> list[Raw]:
        found = (self._indices.get(name, {}).get(key, ()) for name in _child_indices())
        return [raw for collection in found for raw in collection]

    def pods(self, key: ServiceKey) -> list[Raw]:
        return list(self._indices.get(PODS, {}).get(key, ()))


def _owner_kinds(cluster: Cluster) -> list[tuple[str, str, str, str, str]]:
    """Index name, group, version, plural, and what ends the names in keys."""
    routes = [(ROUTES, GROUP, VERSION, ROUTE_PLURAL, ROUTE_SUFFIX)] if cluster.has_routes else []
    return [(SERVICES, GROUP, VERSION, "inferenceservices", ""), *routes]


def _child_kinds(cluster: Cluster) -> dict[str, tuple[str, str, str]]:
    """Index name -> group, version, plural."""
    policy_group, policy_version = cluster.policy_api.split("/")
    kinds = {
        "deployments": ("apps", "v1", "deployments"),
        "daemonsets": ("apps", "v1", "daemonsets"),
        "configmaps": ("", "v1", "configmaps"),
        "service_objects": ("", "v1", "services"),
        "serviceaccounts": ("", "v1", "serviceaccounts"),
        "poddisruptionbudgets": (policy_group, policy_version, "poddisruptionbudgets"),
        "networkpolicies": ("networking.k8s.io", "v1", "networkpolicies"),
    }
    if cluster.has_pool_scalers:
        # A watch of what cannot be watched would keep all others waiting.
        kinds[SCALER_PLURAL] = (GROUP, VERSION, SCALER_PLURAL)
    gateways = ((POOL_API, POOL_KIND), (HTTP_ROUTE_API, HTTP_ROUTE_KIND))
    for api, kind in (
        *(gateways if cluster.has_gateways else ()),
        *([(SET_API, SET_KIND)] if cluster.has_sets else ()),
    ):
        group, version = api.split("/")
        kinds[PLURALS[kind]] = (group, version, PLURALS[kind])
    return kinds


def _child_indices() -> tuple[str, ...]:
    """Names of the indices of children, as the most capable cluster has them."""
    return tuple(_child_kinds(Cluster()))


def watched_paths(cluster: Cluster, namespaces: Sequence[str]) -> list[str]:
    """Return the REST paths of all collections that are watched. No namespaces means all."""
    owners = [kind for _, *kind, _ in _owner_kinds(cluster)]
    kinds = [*owners, *_child_kinds(cluster).values(), _POD_KIND]
    return [
        (f"/apis/{group}/{version}" if group else f"/api/{version}")
        + (f"/namespaces/{namespace}/{plural}" if namespace else f"/{plural}")
        for group, version, plural in kinds
        for namespace in namespaces or ("",)
    ]


def _listening_login(
    answered: Callable[[str, int], None],
) -> Callable[..., Awaitable[kopf.AiohttpSession]]:
    """kopf's own login, with a session that tells of the path and status of each answer."""

    async def tell(_: object, __: object, end: aiohttp.TraceRequestEndParams) -> None:
        answered(end.url.path, end.response.status)

    async def log_in(**kwargs: Any) -> kopf.AiohttpSession:
        found = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        if found is None:
            raise kopf.LoginError("no cluster to talk to")
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(tell)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()),
            headers=found.as_http_headers(),
            proxy=found.proxy_url,
            trust_env=found.trust_env,
            trace_configs=[trace],
        )
        return kopf.AiohttpSession(
            server=found.server, default_namespace=found.default_namespace, aiohttp_session=session
        )

    return log_in


def registry(
    cluster: Cluster,
    indexed: Indexed,
    changed: Callable[[ServiceKey], None],
    answered: Callable[[str, int], None],
) -> kopf.OperatorRegistry:
    """Return the handlers of one run of kopf. Each calls `changed` with the service's key.

    They run only after all indices hold what the cluster held at the start. `answered` is called
    with the path and the status of each answer of the API server.
    """
    handlers = kopf.OperatorRegistry()
    kopf.on.login(id="login", registry=handlers)(_listening_login(answered))

    def follow(
        name: str,
        kind: tuple[str, str, str],
        key_of: Callable[[Raw], ServiceKey],
        kept: Callable[[dict[str, Any]], Raw],
        labels: dict[str, Any] | None = None,
    ) -> None:
        async def index(body: kopf.Body, **_: Any) -> dict[ServiceKey, Raw]:
            return {key_of(body): kept(dict(body))}

        async def wake(body: kopf.Body, **kwargs: Any) -> None:
            indexed.adopt(kwargs)
            changed(key_of(body))

        kopf.index(*kind, id=name, labels=labels, registry=handlers)(index)
        kopf.on.event(*kind, id=f"wake_{name}", labels=labels, registry=handlers)(wake)

    for name, group, version, plural, suffix in _owner_kinds(cluster):
        follow(name, (group, version, plural), partial(_own_key, suffix), _without_bookkeeping)
    # The server has filtered already; this keeps out what was relabelled since.
    ours: dict[str, Any] = {MANAGED_BY_LABEL: MANAGED_BY, SERVICE_LABEL: kopf.PRESENT}
    for name, child_kind in (_child_kinds(cluster) | {PODS: _POD_KIND}).items():
        follow(name, child_kind, _service_key, trimmed, ours)
    return handlers


def settings(cluster: Cluster) -> kopf.OperatorSettings:
    """Watch only our objects, filtered by the server, and write nothing onto them."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.watching.server_timeout = WATCH_TURN_S
    selector = f"{MANAGED_BY_LABEL}={MANAGED_BY},{SERVICE_LABEL}"
    for _, _, plural in (*_child_kinds(cluster).values(), _POD_KIND):
        chosen.watching.label_selectors[plural] = selector
    return chosen


def _own_key(suffix: str, body: Raw) -> ServiceKey:
    return body["metadata"]["namespace"], body["metadata"]["name"] + suffix


def _service_key(body: Raw) -> ServiceKey:
    """The service that owns a child, by its label or, if that was tampered with, by its owner."""
    meta = body["metadata"]
    suffixes = {KIND: "", ROUTE_KIND: ROUTE_SUFFIX}
    owners = (o for o in meta.get("ownerReferences") or () if o.get("kind") in suffixes)
    owner = next((str(o["name"]) + suffixes[o["kind"]] for o in owners), "")
    return meta["namespace"], owner or (meta.get("labels") or {}).get(SERVICE_LABEL, "")


def _without_bookkeeping(raw: dict[str, Any]) -> Raw:
    meta = {k: v for k, v in raw["metadata"].items() if k != "managedFields"}
    return raw | {"metadata": meta}


_KEPT_META = (
    "name", "namespace", "uid", "resourceVersion", "generation", "labels", "annotations",
    "ownerReferences", "creationTimestamp", "deletionTimestamp", "finalizers",
)  # fmt: skip


def trimmed(raw: dict[str, Any]) -> Raw:
    """What decisions need of a child: a thousand services have tens of thousands of them."""
    meta = {name: raw["metadata"][name] for name in _KEPT_META if name in raw["metadata"]}
    kept: dict[str, Any] = {"apiVersion": raw["apiVersion"], "kind": raw["kind"], "metadata": meta}
    if raw["kind"] == "Deployment":
        spec = raw["spec"]
        kept["spec"] = {"replicas": spec.get("replicas", 1), "strategy": spec.get("strategy")}
    if raw["kind"] == SET_KIND:
        kept["spec"] = {"roles": [_trimmed_role(role) for role in raw["spec"]["roles"]]}
    if raw["kind"] == SCALER_KIND:
        kept["spec"] = {"replicas": raw["spec"]["replicas"]}
    if raw["kind"] == "Pod":
        # What it may wait for, and later only whose keys it has; see `status.references`.
        spec = raw["spec"]
        keys = [each for each in spec.get("volumes") or () if each.get("name") == KEYS_VOLUME]
        kept["spec"] = {"volumes": keys} if _is_ready(raw) else spec
    if raw["kind"] in (*WORKLOADS, "DaemonSet", "Pod", SCALER_KIND, HTTP_ROUTE_KIND):
        kept["status"] = raw.get("status") or {}
    return kept


def _trimmed_role(role: Raw) -> Raw:
    spec = role.get("spec") or {}
    own = {"replicas": spec.get("replicas", 1), "rolloutStrategy": spec.get("rolloutStrategy")}
    return {"name": role["name"], "spec": own}


def _is_ready(pod: Raw) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
