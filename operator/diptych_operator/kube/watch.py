"""Uses kopf to watch resources, keeps what it saw, and reports which service has changed.

kopf's handlers for creation and update are not used, because they report edges. Its daemons are not
used, because they put a finalizer on each service, which then cannot be deleted while the operator
is away. Children are deleted by their owner references instead. Its indices are not used, because
while they fill, each object that comes wakes the tasks of all others: an operator that took over a
thousand services, which have 26,000 objects, looked at none within three minutes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import kopf
from yarl import URL

from diptych_operator.api.base import Raw, ServiceKey
from diptych_operator.api.names import (
    KEYS_VOLUME,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROUTE_SUFFIX,
    SERVICE_LABEL,
    TLS_VOLUME,
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
from diptych_operator.kube.indexed import PODS, ROUTES, SERVICES, Indexed
from diptych_operator.kube.liveness import WATCH_TURN_S
from diptych_operator.kube.workloads import WORKLOADS

_POD_KIND = ("", "v1", "pods")
CHUNK = 500
"""Objects of one page of a list. A whole list of a thousand services is parsed to 140 MiB."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of objects that is watched."""

    index: str
    group: str
    version: str
    plural: str
    key_of: Callable[[Raw], ServiceKey]
    kept: Callable[[dict[str, Any]], Raw]
    """Returns the part of an object that is kept; given that part, it returns all of it."""
    is_ours: Callable[[Raw], bool]

    def path(self, namespace: str) -> str:
        """The REST path of the collection; of all namespaces, if it is empty."""
        return (
            (f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}")
            + (f"/namespaces/{namespace}/" if namespace else "/")
            + self.plural
        )


def _owner_kinds(cluster: Cluster) -> list[tuple[str, tuple[str, str, str], str]]:
    """Index; group, version and plural; what ends the names in keys."""
    routes = [(ROUTES, (GROUP, VERSION, ROUTE_PLURAL), ROUTE_SUFFIX)] if cluster.has_routes else []
    return [(SERVICES, (GROUP, VERSION, "inferenceservices"), ""), *routes]


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


def _kinds(cluster: Cluster) -> list[_Kind]:
    owners = [
        _Kind(index, *kind, partial(_own_key, suffix), _without_bookkeeping, lambda _: True)
        for index, kind, suffix in _owner_kinds(cluster)
    ]
    children = _child_kinds(cluster) | {PODS: _POD_KIND}
    return owners + [
        # The server has filtered already; this keeps out what was relabelled since.
        _Kind(index, *kind, _service_key, trimmed, _has_our_labels)
        for index, kind in children.items()
    ]


def watched_paths(cluster: Cluster, namespaces: Sequence[str]) -> list[str]:
    """Return the REST paths of all collections that are watched. No namespaces means all."""
    return [kind.path(space) for kind in _kinds(cluster) for space in namespaces or ("",)]


def _listening_login(
    answered: Callable[[str, int], None], listed: Callable[[URL, Any], None]
) -> Callable[..., Awaitable[kopf.AiohttpSession]]:
    """kopf's own login, with a session that tells of the path and status of each answer, and of
    what kopf is about to get out of it."""

    class Answer(aiohttp.ClientResponse):
        async def json(self, **kwargs: Any) -> Any:
            content = await super().json(**kwargs)
            listed(self.url, content)
            return content

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
            response_class=Answer,
        )
        return kopf.AiohttpSession(
            server=found.server, default_namespace=found.default_namespace, aiohttp_session=session
        )

    return log_in


def registry(
    cluster: Cluster,
    namespaces: Sequence[str],
    indexed: Indexed,
    changed: Callable[[ServiceKey], None],
    answered: Callable[[str, int], None],
) -> kopf.OperatorRegistry:
    """Return the handlers of one run of kopf, which keep `indexed` true.

    `changed` is called with the key of each service that something happened to; it is too early to
    act before `indexed` is whole. `answered` is called with the path and the status of each answer
    of the API server.
    """
    kinds = _kinds(cluster)
    lists = {kind.path(space): (kind, space) for kind in kinds for space in namespaces or ("",)}

    def listed(url: URL, content: Any) -> None:
        if url.path not in lists or "items" not in content:
            return
        kind, namespace = lists[url.path]
        of_all = {"kind": content["kind"].removesuffix("List"), "apiVersion": content["apiVersion"]}
        # kopf goes on with what is kept: many objects wait for their turn at once.
        content["items"] = [kind.kept(of_all | raw) for raw in content["items"]]
        found = [(kind.key_of(raw), raw) for raw in content["items"] if kind.is_ours(raw)]
        is_first = "continue" not in url.query
        is_last = not content["metadata"].get("continue")
        for key in indexed.list_page(
            url.path, kind.index, namespace, found, is_first=is_first, is_last=is_last
        ):
            changed(key)

    handlers = kopf.OperatorRegistry()
    kopf.on.login(id="login", registry=handlers)(_listening_login(answered, listed))

    def follow(kind: _Kind) -> None:
        async def heard(type: str | None, body: kopf.Body, **_: Any) -> None:
            raw = kind.kept(dict(body))
            if type == "DELETED" or not kind.is_ours(raw):
                concerned = indexed.drop(kind.index, raw["metadata"]["uid"])
            else:
                concerned = indexed.keep(kind.index, kind.key_of(raw), raw)
            for key in concerned:
                changed(key)

        resource = (kind.group, kind.version, kind.plural)
        kopf.on.event(*resource, id=kind.index, registry=handlers)(heard)

    for kind in kinds:
        follow(kind)
    return handlers


def settings(cluster: Cluster) -> kopf.OperatorSettings:
    """Watch only our objects, filtered by the server, and write nothing onto them."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.watching.server_timeout = WATCH_TURN_S
    chosen.watching.chunk_size = CHUNK
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


def _has_our_labels(body: Raw) -> bool:
    labels = body["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY_LABEL) == MANAGED_BY and SERVICE_LABEL in labels


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
        # What it may wait for, and later only whose keys and certificate it has; see
        # `status.references`.
        spec, lasting = raw["spec"], (KEYS_VOLUME, TLS_VOLUME)
        secrets = [each for each in spec.get("volumes") or () if each.get("name") in lasting]
        kept["spec"] = {"volumes": secrets} if is_ready(raw) else spec
    if raw["kind"] in (*WORKLOADS, "DaemonSet", "Pod", SCALER_KIND, HTTP_ROUTE_KIND):
        kept["status"] = raw.get("status") or {}
    return kept


def _trimmed_role(role: Raw) -> Raw:
    spec = role.get("spec") or {}
    own = {"replicas": spec.get("replicas", 1), "rolloutStrategy": spec.get("rolloutStrategy")}
    return {"name": role["name"], "spec": own}


def is_ready(pod: Raw) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
