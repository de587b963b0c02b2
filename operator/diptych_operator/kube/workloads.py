"""What makes the pods of pools: a Deployment for each of them, or one DisaggregatedSet for both.

All decisions are about Deployments. A DisaggregatedSet is read as one for each of its roles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from diptych_operator.api.base import Object, Raw
from diptych_operator.api.names import COMPONENT_LABEL, REVISION_LABEL, ROLE_LABEL, object_name
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.cluster import SET_API, SET_KIND

WORKLOADS: Final = ("Deployment", SET_KIND)


def gathered(service: InferenceService, objects: Iterable[Object]) -> list[Object]:
    """Return a revision's objects; in place of its Deployments what the service asks for."""
    kept = list(objects)
    if service.spec.workload == "Deployment":
        return kept
    pools = [obj for obj in kept if obj["kind"] == "Deployment"]
    marks = dict.fromkeys([COMPONENT_LABEL], "engines")
    for name, value in pools[0]["metadata"]["labels"].items():
        if all(pool["metadata"]["labels"].get(name) == value for pool in pools):
            marks[name] = value
    made: Object = {
        "apiVersion": SET_API,
        "kind": SET_KIND,
        "metadata": {
            # Short: names that are made from it have to fit 63 characters.
            "name": object_name(service, marks[REVISION_LABEL]),
            "namespace": service.metadata.namespace,
            "labels": marks,
        },
        "spec": {"roles": [_role(service, pool) for pool in pools]},
    }
    return [*(obj for obj in kept if obj["kind"] != "Deployment"), made]


def _role(service: InferenceService, pool: Object) -> Object:
    spec, name = pool["spec"], pool["metadata"]["labels"][ROLE_LABEL]
    asked = next(part.pod_template for role, part in service.pools.items() if role == name)
    # Queues and topologies are asked for at the LeaderWorkerSet as well as at its pods.
    meta = {
        part: found
        for part in ("labels", "annotations")
        if (found := (asked.get("metadata") or {}).get(part))
    }
    return {
        "name": name,
        **({"metadata": meta} if meta else {}),
        "spec": {
            "replicas": spec["replicas"],
            # As a Deployment has its pods: none has a number, and new ones wait for no old ones.
            "groupIdentity": "Hash",
            "groupReplacementPolicy": "Immediate",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": spec["strategy"]["rollingUpdate"],
            },
            "leaderWorkerTemplate": {
                "size": 1,
                # A container that fails starts again in its pod.
                "restartPolicy": "None",
                "workerTemplate": spec["template"],
            },
        },
    }


def as_deployments(raw: Raw) -> list[Raw]:
    """Return the Deployment that an object is, or those that it stands for; nothing if none."""
    if raw["kind"] == "Deployment":
        return [raw]
    if raw["kind"] != SET_KIND:
        return []
    return [_of_role(raw, role) for role in raw["spec"]["roles"]]


def deployments_among(objects: Iterable[Raw]) -> list[Raw]:
    return [each for raw in objects for each in as_deployments(raw)]


def _of_role(raw: Raw, role: Raw) -> Raw:
    meta, status, spec = raw["metadata"], raw.get("status") or {}, role["spec"]
    name = role["name"]
    told = {each["name"]: each for each in status.get("roleStatuses") or ()}.get(name, {})
    marks = (meta.get("labels") or {}) | {ROLE_LABEL: name, COMPONENT_LABEL: name}
    rolling = (spec.get("rolloutStrategy") or {}).get("rollingUpdateConfiguration")
    own: dict[str, Any] = {
        "replicas": spec["replicas"],
        "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
    }
    if template := (spec.get("leaderWorkerTemplate") or {}).get("workerTemplate"):
        own |= {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**meta, "name": f"{meta['name']}-{name}", "labels": marks},
        "spec": own,
        "status": {"observedGeneration": status.get("observedGeneration", 0), **told},
    }


def sizes(raw: Raw) -> dict[str, int]:
    """Return the wanted pods of each role."""
    return {
        each["metadata"]["labels"].get(ROLE_LABEL, ""): each["spec"]["replicas"]
        for each in as_deployments(raw)
    }


def resized(raw: Raw, counts: Counts) -> list[Object]:
    """Return the operations that change a DisaggregatedSet's sizes: all at once, as a role without
    pods beside one with some is refused. (Kubernetes 1.20 forgets the rest of a role of
    which a part is applied.)"""
    return [
        {
            "op": "replace",
            "path": f"/spec/roles/{place}/spec/replicas",
            "value": counts.of(role["name"]),
        }
        for place, role in enumerate(raw["spec"]["roles"])
    ]
