"""The DisaggregatedSet, for clusters that lack it: what the operator sets and reads of it.

Written by hand after LeaderWorkerSet 1.0 (kubernetes-sigs/lws, `charts/lws/crds` and
`api/disaggregatedset/v1`), which has more, and says of pods all that Kubernetes does. No controller
comes with it. On the import path of the tests.
"""

from __future__ import annotations

from typing import Any

from diptych_operator.kube.client import PLURALS
from diptych_operator.kube.cluster import SET_API, SET_KIND

Schema = dict[str, Any]


def _object(*required: str, **properties: Schema) -> Schema:
    made: Schema = {"type": "object", "properties": properties}
    return made | ({"required": list(required)} if required else {})


def _texts(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _by_key(key: str, items: Schema, **more: Any) -> Schema:
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "items": items, **keys, **more}


def _number(least: int, default: int | None = None) -> Schema:
    made: Schema = {"type": "integer", "format": "int32", "minimum": least}
    return made if default is None else made | {"default": default}


_ANY: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_META = _object(labels=_STRINGS, annotations=_STRINGS)
_NUMBER_OR_SHARE: Schema = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
}
_ROLLING = _object(
    maxSurge=_NUMBER_OR_SHARE | {"default": 0},
    maxUnavailable=_NUMBER_OR_SHARE | {"default": 1},
    partition=_number(0, default=0),
)
_TEMPLATE = _object(
    "workerTemplate",
    size=_number(1, default=1),
    restartPolicy=_texts("Default", "None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"),
    workerTemplate=_object(metadata=_META, spec=_ANY),
)
_GROUPS = _object(
    "leaderWorkerTemplate",
    replicas=_number(0, default=1),
    groupIdentity=_texts("Ordinal", "Hash"),
    groupReplacementPolicy=_texts("PostTermination", "Immediate"),
    startupPolicy=_texts("LeaderCreated", "LeaderReady") | {"default": "LeaderCreated"},
    rolloutStrategy=_object(
        "type",
        type=_texts("RollingUpdate") | {"default": "RollingUpdate"},
        rollingUpdateConfiguration=_ROLLING,
    ),
    leaderWorkerTemplate=_TEMPLATE,
)
_NAME: Schema = {
    "type": "string", "minLength": 1, "maxLength": 63,
    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
}  # fmt: skip
_ROLES = _by_key("name", _object("name", name=_NAME, metadata=_META, spec=_GROUPS), minItems=2)
_RULE = {
    "rule": "self.roles.all(r, r.spec.replicas == 0) || self.roles.all(r, r.spec.replicas > 0)",
    "message": "all roles have pods, or none has",
}
_STATUS = _object(
    observedGeneration={"type": "integer", "format": "int64"},
    roleStatuses=_by_key(
        "name",
        _object(
            "name",
            name={"type": "string"},
            replicas=_number(0),
            readyReplicas=_number(0),
            updatedReplicas=_number(0),
        ),
    ),
    conditions={"type": "array", "items": _ANY},
)
SET_SCHEMA = _object(
    "spec",
    apiVersion={"type": "string"},
    kind={"type": "string"},
    metadata={"type": "object"},
    spec=_object("roles", slices=_number(1, default=1), roles=_ROLES)
    | {"x-kubernetes-validations": [_RULE]},
    status=_STATUS,
)


def set_definition() -> dict[str, Any]:
    """The CRD."""
    group, version = SET_API.split("/")
    plural = PLURALS[SET_KIND]
    names = {"kind": SET_KIND, "plural": plural, "singular": SET_KIND.lower()}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": names,
            "versions": [served | {"schema": {"openAPIV3Schema": SET_SCHEMA}}],
        },
    }
