"""What the Deployments of all roles have in common, whichever program their pods run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from diptych_operator.api.base import SpecError
from diptych_operator.api.merge import merge, removed
from diptych_operator.api.names import (
    API_KEYS_DIR,
    BIND_HOST_VARIABLE,
    CERTIFICATES_DIR,
    CONFIG_DIR,
    CONFIG_HASH_ANNOTATION,
    KEYS_DIR,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    PORT_VARIABLES,
    REVISION_LABEL,
    SERVING_DIR,
    TLS_DIR,
    TLS_VOLUME,
    ZONE_LABEL,
    Owner,
    Part,
    metadata,
    object_name,
    selector,
)
from diptych_operator.api.pools import Pool
from diptych_operator.api.route import RouteSpec
from diptych_operator.api.router import Router
from diptych_operator.render.invariants import check_invariants
from diptych_operator.render.model import CONFINED, ModelMount

USER_ID = 10001
LINGER_SECONDS = 3
"""How long Kubernetes may take to send clients elsewhere once a router terminates."""
EXIT_SECONDS = 15
"""How long a drained program may still need to end, before SIGKILL."""


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of one Deployment, before the user's podTemplate is merged over them."""

    role: Part
    part: Pool | Router | RouteSpec
    replicas: int
    container: dict[str, Any]
    volumes: list[dict[str, Any]]
    """Volumes of ConfigMaps and Secrets. Each is mounted at the place that its name stands for."""
    config_hash: str
    """Empty for a program that reads no ConfigMap."""
    model: ModelMount
    revision: str = ""
    linger_seconds: int = LINGER_SECONDS
    """How long a pod that is to end may still get new work."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    scratch: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Volumes that the container may write to, beside /tmp: name -> mount path and source."""
    init_containers: Sequence[dict[str, Any]] = ()
    """Init containers beside those that fetch the model."""
    read_only: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Volumes that the init containers fill, in the form of `scratch`."""


def deployment(service: Owner, pods: Pods) -> dict[str, Any]:
    """Render a Deployment. Raises `SpecError` for a podTemplate that does not fit."""
    role = pods.role
    ours = _pod_template(service, pods)
    field = "spec.podTemplate" if role == "route" else f"spec.{role}.podTemplate"
    # Also a field that is removed must be given in its shape.
    template = merge(ours, pods.part.pod_template, field)
    if pods.part.pod_template_remove:
        kept = removed(ours, pods.part.pod_template_remove, f"{field}Remove")
        template = merge(kept, pods.part.pod_template, field)
    selected = selector(service, pods.role)
    if pods.revision:
        selected = selected | {REVISION_LABEL: pods.revision}
    relied_on = selected | {MANAGED_BY_LABEL: MANAGED_BY}  # the operator watches no other pods
    _check_template(template, relied_on, pods.container["name"], field)
    check_invariants(template, ours, pods.container["name"], field)
    if not template["spec"].get("hostNetwork"):
        _keep_off_the_node(template, pods.container["name"])
    rollout = service.spec.rollout
    # Routers are replaced one more at a time, whatever the pools do: they are cheap.
    surge, unavailable = (
        (1, 0) if role == "router" else (rollout.max_surge, rollout.max_unavailable)
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, role, role, pods.revision),
        "spec": {
            "replicas": pods.replicas,
            "paused": False,  # or `kubectl rollout pause` would keep it from every change
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": max(rollout.progress_deadline_seconds, 60),
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
            },
            "selector": {"matchLabels": selected},
            "template": template,
        },
    }


def _pod_template(service: Owner, pods: Pods) -> dict[str, Any]:
    role = pods.role
    mount_paths = {
        "config": CONFIG_DIR,
        "keys": KEYS_DIR,
        "serving": SERVING_DIR,
        "api-keys": API_KEYS_DIR,
        TLS_VOLUME: TLS_DIR,
        "certificates": CERTIFICATES_DIR,
    }
    mounts = {
        "volumeMounts": [
            *(
                {"name": name, "mountPath": mount_paths[name], "readOnly": True}
                for name in (volume["name"] for volume in pods.volumes)
            ),
            {"name": "tmp", "mountPath": "/tmp"},
            *({"name": name, "mountPath": path} for name, (path, _) in pods.scratch.items()),
            *(
                {"name": name, "mountPath": path, "readOnly": True}
                for name, (path, _) in pods.read_only.items()
            ),
            *pods.model.volume_mounts,
        ]
    }
    init_containers = [*pods.init_containers, *pods.model.init_containers]
    own_labels = metadata(service, role, role, pods.revision)["labels"]
    return {
        "metadata": {
            "labels": own_labels,
            "annotations": {
                **({CONFIG_HASH_ANNOTATION: pods.config_hash} if pods.config_hash else {}),
                **pods.annotations,
            },
        },
        "spec": {
            # Said, or what somebody has set in the Deployment by hand would stay.
            **dict.fromkeys(("hostNetwork", "hostPID", "hostIPC"), False),
            "serviceAccountName": object_name(service, role),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": pods.linger_seconds
            + service.spec.availability.drain_seconds
            + EXIT_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                # A big model volume is not walked at every mount.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": selector(service, role)},
                }
            ],
            **({"initContainers": init_containers} if init_containers else {}),
            "containers": [pods.container | CONFINED | mounts],
            "volumes": [
                *pods.volumes,
                {"name": "tmp", "emptyDir": {}},
                *(
                    {"name": name, **source}
                    for name, (_, source) in chain(pods.scratch.items(), pods.read_only.items())
                ),
                *pods.model.volumes,
            ],
        },
    }


def _keep_off_the_node(template: dict[str, Any], container: str) -> None:
    """Say that the container has no port of its node. A hostNetwork that is set by hand gives it
    some, which would outlive it."""
    (own,) = (each for each in template["spec"]["containers"] if each["name"] == container)
    for port in own.get("ports") or ():
        port.setdefault("hostPort", 0)


def _check_template(
    template: dict[str, Any], labels: dict[str, str], container: str, field: str
) -> None:
    """A podTemplate may change anything but what the rest of the service relies on."""
    found = (template.get("metadata") or {}).get("labels") or {}
    for label, value in labels.items():
        if found.get(label) != value:
            raise SpecError(f"{field}.metadata.labels", f"{label} must stay {value!r}")
    names = [entry["name"] for entry in (template.get("spec") or {}).get("containers") or []]
    if container not in names:
        raise SpecError(f"{field}.spec.containers", f"the container {container!r} must stay")


def engine_environment(ports: dict[str, int], folders: Mapping[str, str]) -> list[dict[str, Any]]:
    """As `environment`, and on which node."""
    return [
        *environment(ports, folders),
        field_of_pod("NODE_NAME", "spec.nodeName"),
        field_of_pod("NODE_ZONE", f"metadata.labels['{ZONE_LABEL}']"),
    ]


def environment(ports: dict[str, int], folders: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the variables with a pod's name and address, and those of its `folders`."""
    return [
        field_of_pod("POD_NAME", "metadata.name"),
        field_of_pod("POD_IP", "status.podIP"),
        *(variable(name, path) for name, path in folders.items()),
        variable(BIND_HOST_VARIABLE, "0.0.0.0"),
        *(
            variable(PORT_VARIABLES[name], str(port))
            for name, port in ports.items()
            if name in PORT_VARIABLES  # else a program knows it by another one
        ),
    ]


def variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def field_of_pod(name: str, path: str) -> dict[str, Any]:
    """Return a variable with the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def probe(path: str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    """Return a probe of the port `http`, which says no after this many failures in a row."""
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def container_ports(ports: dict[str, int]) -> list[dict[str, Any]]:
    # The protocol is part of a port's identity for server-side apply.
    return [
        {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
    ]
