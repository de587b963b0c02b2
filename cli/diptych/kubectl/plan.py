"""What an operator would change: its rendering beside the cluster's objects."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from diptych.kubectl.cluster import Cluster, ClusterError, Raw
from diptych_operator import arguments
from diptych_operator.api.base import Object, SpecError
from diptych_operator.api.images import Images
from diptych_operator.api.names import (
    CONFIG_HASH_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
    object_name,
)
from diptych_operator.api.parse import parse_object
from diptych_operator.kube import cluster as capabilities
from diptych_operator.kube.client import FIELD_MANAGER, differences
from diptych_operator.kube.cluster import SET_KIND
from diptych_operator.kube.workloads import WORKLOADS, deployments_among, sizes
from diptych_operator.render import fixed_counts, render_revision, render_shared
from diptych_operator.revision import key_set, revision
from diptych_operator.service_snapshot import ServiceSnapshot, key_sets, label
from diptych_operator.status.observed import Observed
from diptych_operator.upgrades import opens
from diptych_protocol.router_settings import Serving

_TEMPLATE = re.compile(r"^spec\.(template|roles.*\.leaderWorkerTemplate)")
LONG = 70
"""Longer values are not shown."""


@dataclass(frozen=True, slots=True)
class Change:
    kind: str
    name: str
    path: str
    """The field; empty if there is no such object yet."""
    live: object = None
    wanted: object = None

    @property
    def text(self) -> str:
        values = f": {self.live} -> {self.wanted}" if self.path else ": made anew"
        told = values if len(values) <= LONG else ""
        return f"    {self.kind} {self.name}{self.path and ' '}{self.path}{told}"


@dataclass(frozen=True, slots=True)
class ServicePlan:
    namespace: str
    name: str
    changes: tuple[Change, ...] = ()
    replaces_pods: bool = False
    problem: str = ""
    """Why nothing can be rendered."""
    not_before: datetime | None = None
    """When the rollout window begins that replacements wait for, unless the user asked for them."""

    @property
    def pending(self) -> bool:
        return bool(self.changes or self.problem)

    @property
    def text(self) -> str:
        said = "pods are replaced" if self.replaces_pods else "no pod is replaced"
        if self.replaces_pods and self.not_before:
            said += f"; by an upgrade not before {self.not_before:%Y-%m-%dT%H:%M:%SZ}"
        head = self.problem or (said if self.changes else "nothing")
        told = (change.text for change in self.changes)
        return "\n".join((f"{self.namespace}/{self.name}: {head}", *told))


def plans(cluster: Cluster, services: Sequence[Raw], operator_namespace: str) -> list[ServicePlan]:
    """Compare every service. Raises `ClusterError`."""
    args = _understood(cluster.operator(operator_namespace))
    version, served = cluster.version()
    able = capabilities.read_cluster(
        version["major"],
        version["minor"],
        served,
        operator_namespace,
        has_gateways={capabilities.POOL_API, capabilities.HTTP_ROUTE_API} <= {*served},
        has_sets=capabilities.SET_API in served,
    )
    found = (
        plan_service(raw, cluster.children(raw, able), arguments.images(args), able)
        for raw in services
    )
    not_before = opens(args.rollout_windows, datetime.now(UTC))
    return [replace(each, not_before=not_before) for each in found]


def _understood(words: list[str]) -> argparse.Namespace:
    """The arguments of an operator that may be of another version, and have others."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return arguments.parser().parse_known_args(words)[0]
    except SystemExit as exc:
        why = said.getvalue().strip().rpartition("error: ")[2]
        raise ClusterError(
            f"the operator that runs has an argument that this plugin does not understand ({why}); "
            "take the plugin of its version, or upgrade it"
        ) from exc


def plan_service(
    raw: Raw, children: Sequence[Raw], images: Images, cluster: capabilities.Cluster
) -> ServicePlan:
    """Compare one service with what was made of it."""
    meta = raw["metadata"]
    if "deletionTimestamp" in meta:  # the operator no longer looks at it
        return ServicePlan(meta["namespace"], meta["name"])
    try:
        changes = tuple(_changes(raw, children, images, cluster))
    except SpecError as exc:
        return ServicePlan(meta["namespace"], meta["name"], problem=str(exc))
    replaces = any(any(sizes(child).values()) for child in children) and any(
        change.kind in WORKLOADS and (not change.path or _TEMPLATE.search(change.path))
        for change in changes
    )
    return ServicePlan(meta["namespace"], meta["name"], changes, replaces)


def _changes(
    raw: Raw, children: Sequence[Raw], images: Images, cluster: capabilities.Cluster
) -> Iterator[Change]:
    service = parse_object(raw, images)
    live = {(child["kind"], child["metadata"]["name"]): child for child in children}
    keys = key_sets(key_set(service), deployments_among(children))
    target = revision(service)
    snapshot = ServiceSnapshot(
        service, target, keys, {("", *name): child for name, child in live.items()}, (), Observed()
    )
    last = snapshot.last_rendered
    before = last.revision if last else target
    objects = render_shared(service, cluster, keys, Serving())
    # Of one that was never to serve, nothing more is made before it is.
    if not service.spec.suspend or any(label(child, REVISION_LABEL) for child in children):
        objects += render_revision(service, cluster, target, keys, fixed_counts(service))
    for obj in objects:
        kind, name = obj["kind"], obj["metadata"]["name"]
        if name == object_name(service, "serving"):
            continue  # it follows the rollout
        there, wanted = live.get((kind, name)), obj
        if there is None and target in name:  # a new revision: what differs from the last one
            wanted = _as_of(obj, target, before)
            there = live.get((kind, wanted["metadata"]["name"]))
        if there is None:
            yield Change(kind, name, "")
            continue
        for found in differences(_compared(wanted), _without_others(there, _applied(there))):
            if CONFIG_HASH_ANNOTATION not in found.path:  # the ConfigMap shows it
                yield Change(kind, name, found.path, found.live, found.wanted)


def _as_of(obj: Object, target: str, before: str) -> Object:
    """The same object with another revision's name."""
    text = msgspec.json.encode(obj).replace(target.encode(), before.encode())
    return msgspec.json.decode(text, type=Object)


def _compared(obj: Object) -> Object:
    """Without what says where it is and how many pods there are."""
    parts = {part: value for part, value in obj.items() if part not in ("apiVersion", "metadata")}
    if obj["kind"] == "Deployment" and label(obj, ROLE_LABEL) != "router":
        parts["spec"] = {name: v for name, v in parts["spec"].items() if name != "replicas"}
    if obj["kind"] == SET_KIND:
        parts["spec"] = {"roles": [_without_size(role) for role in obj["spec"]["roles"]]}
    return parts


def _without_size(role: Object) -> Object:
    return {**role, "spec": {name: v for name, v in role["spec"].items() if name != "replicas"}}


def _applied(live: Raw) -> Raw:
    """The fields that an operator applied, in the form of Kubernetes' FieldsV1."""
    for each in live["metadata"].get("managedFields") or ():
        if (each.get("manager"), each.get("operation")) == (FIELD_MANAGER, "Apply"):
            return dict(each.get("fieldsV1") or {})
    return {}


def _without_others(live: Any, applied: Raw) -> Any:
    """Without the entries of lists that others added, as injected containers: an apply leaves
    them. Those of a list whose entries have no keys come and go with it."""
    if isinstance(live, Mapping):
        return {
            name: _without_others(v, applied.get(f"f:{name}") or {}) for name, v in live.items()
        }
    entries = [(msgspec.json.decode(k[2:]), v) for k, v in applied.items() if k.startswith("k:")]
    if not (isinstance(live, list) and entries):
        return live
    return [
        _without_others(entry, fields)
        for entry in live
        for key, fields in entries
        if key.items() <= entry.items()
    ]
