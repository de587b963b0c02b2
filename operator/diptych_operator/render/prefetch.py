"""What `spec.model.cache.prefetch` asks for: on each node where an engine may come, a pod that has
started as an engine's does, and then sleeps. So the node has the images and the model, verified and
packed, before an engine needs them. It is made of the engine's pod and depends on no revision: it
stays while there are no engines, and a changed model comes to all nodes as its rollout begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from diptych_operator.api.base import Object, SpecError, digest
from diptych_operator.api.names import (
    COMPONENT_LABEL,
    CONFIG_HASH_ANNOTATION,
    ENGINE_ANNOTATION,
    ENGINE_FILE,
    INSTANCE_LABEL,
    PREFETCH_SUFFIX,
    REVISION_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    metadata,
)
from diptych_operator.api.pools import PoolName
from diptych_operator.api.service import InferenceService

_REQUESTS: Final = {"cpu": "10m", "memory": "32Mi"}
"""Next to nothing: these pods give way to all others."""
_ENGINES_ONLY: Final = (
    "affinity", "readinessGates", "resourceClaims", "resources", "schedulingGates",
    "topologySpreadConstraints",
)  # fmt: skip
"""Fields of a pod that hold it up or back, or give it devices. Of `affinity`, nodes' stays."""
_KEPT: Final = ("image", "imagePullPolicy", "securityContext", "resources")
"""Fields of an engine's container."""
_ENGINES_LABELS: Final = (SERVICE_LABEL, ROLE_LABEL, REVISION_LABEL)
"""By these the service's Services, budgets and policies would take a pod for an engine."""
_TOLD: Final[Object] = {
    "name": "config",
    "downwardAPI": {
        "items": [
            {
                "path": ENGINE_FILE,
                "fieldRef": {"fieldPath": f"metadata.annotations['{ENGINE_ANNOTATION}']"},
            }
        ]
    },
}
"""Takes the place of the volume with the engines' ConfigMap."""


def daemon_sets(
    service: InferenceService, pools: Mapping[PoolName, Sequence[Object]]
) -> list[Object]:
    """Return one for each pool, or one for two whose pods start alike on the same nodes.

    pools: what `render_revision` makes of each, for no revision. Raises `SpecError` for a
    podTemplate that is none, which the API server has not seen yet.
    """
    found: dict[str, Object] = {}
    for role, objects in pools.items():
        try:
            made = _daemon_set(service, role, objects)
        except (AttributeError, LookupError, TypeError) as exc:
            raise SpecError(
                f"spec.{role}.podTemplate", f"has a field of another kind: {exc}"
            ) from exc
        found.setdefault(_start(made["spec"]["template"]["spec"]), made)
    return list(found.values())


def _start(pod: Object) -> str:
    """Equal for pods of which a node needs one."""
    parts = {part: pod[part] for part in pod if part not in ("serviceAccountName", "volumes")}
    for kind in ("initContainers", "containers"):
        parts[kind] = [each | {"resources": None} for each in parts[kind]]
    return digest(parts)


def _daemon_set(service: InferenceService, role: PoolName, objects: Sequence[Object]) -> Object:
    *configs, deployment = objects
    about = metadata(service, f"{role}{PREFETCH_SUFFIX}", f"{role}{PREFETCH_SUFFIX}")
    selected = {name: about["labels"][name] for name in (INSTANCE_LABEL, COMPONENT_LABEL)}
    meta, engine = (deployment["spec"]["template"][part] for part in ("metadata", "spec"))
    pod = _pod(engine)
    marks = {name: v for name, v in meta["labels"].items() if name not in _ENGINES_LABELS}
    notes = {
        n: v for n, v in (meta.get("annotations") or {}).items() if n != CONFIG_HASH_ANNOTATION
    }
    for config in configs:  # of a revision: these pods get what it says without it
        if any(volume["name"] == _TOLD["name"] for volume in pod["volumes"]):
            notes[ENGINE_ANNOTATION] = config["data"][ENGINE_FILE]
            pod["volumes"] = [_TOLD if v["name"] == _TOLD["name"] else v for v in pod["volumes"]]
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": about,
        "spec": {
            "selector": {"matchLabels": selected},
            "updateStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": "100%"},
            },
            "template": {
                "metadata": {"labels": marks | selected, "annotations": notes},
                "spec": pod,
            },
        },
    }


def _pod(engine: Object) -> Object:
    fetching = [_giving_way(each) for each in engine.get("initContainers") or ()]
    (program,) = (each for each in engine["containers"] if each["name"] == "engine")
    sleeping = {part: program[part] for part in _KEPT if part in program}
    sleeping |= {"name": "sleep", "command": ["sleep", "infinity"]}
    mounted = {mount["name"] for each in fetching for mount in each.get("volumeMounts") or ()}
    affinity = {k: v for k, v in (engine.get("affinity") or {}).items() if k == "nodeAffinity"}
    return {
        **{part: value for part, value in engine.items() if part not in _ENGINES_ONLY},
        **({"affinity": affinity} if affinity else {}),
        "terminationGracePeriodSeconds": 1,
        "initContainers": fetching,
        "containers": [_giving_way(sleeping)],
        "volumes": [each for each in engine.get("volumes") or () if each["name"] in mounted],
    }


def _giving_way(container: Object) -> Object:
    limits = (container.get("resources") or {}).get("limits") or {}
    kept = {name: limits[name] for name in _REQUESTS if name in limits}
    return container | {"resources": {"requests": _REQUESTS, **({"limits": kept} if kept else {})}}
