"""The Deployments: two pools of engines, and the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diptych_operator.api.errors import SpecError
from diptych_operator.api.names import (
    API_KEYS_DIR,
    BIND_HOST_VARIABLE,
    CONFIG_DIR,
    CONFIG_HASH_ANNOTATION,
    CURRENT_KEYS_ANNOTATION,
    ENGINE_FILE,
    KEYS_DIR,
    KEYS_LABEL,
    LINGER_VARIABLE,
    PORT_VARIABLES,
    PREVIOUS_KEYS_ANNOTATION,
    REVISION_LABEL,
    ROUTER_FILE,
    ROUTER_PORTS,
    SERVING_DIR,
    SERVING_FILE,
    TLS_DIR,
    ZONE_LABEL,
    Role,
    dns_target,
    engine_ports,
    metadata,
    object_name,
    selector,
)
from diptych_operator.api.pools import Pool, Resources, Router
from diptych_operator.api.service import InferenceService
from diptych_operator.render.keys import KeySets, keys_volume
from diptych_operator.render.merge import merge
from diptych_operator.render.model import ModelMount

USER_ID = 10001
LINGER_SECONDS = 3
"""Kubernetes takes a moment to send clients elsewhere once a router is on its way out."""
EXIT_SECONDS = 15
"""What a drained program may still need to end, before SIGKILL."""

UCX_TLS = {
    "rdma": "ib,self,cuda_copy,gdr_copy",
    "tcp": "tcp,self,cuda_copy",
    # Shared memory cannot open a connection by address, so TCP stays for the handshake.
    "shm": "shm,tcp,self,cuda_copy,cuda_ipc",
}

_ENGINE_COMMAND = ["python", "-m", "diptych_engine"]
_ENGINE_ARGUMENTS = [
    *("--config", f"$(DIPTYCH_CONFIG_DIR)/{ENGINE_FILE}"),
    *("--keys", "$(DIPTYCH_KEYS_DIR)"),
    *("--engine-id", "$(POD_NAME)"),
    *("--node", "$(NODE_NAME)"),
    *("--zone", "$(NODE_ZONE)"),
    *("--host", "$(DIPTYCH_BIND_HOST)"),
    *("--advertise-host", "$(POD_IP)"),
    *("--port", "$(DIPTYCH_HTTP_PORT)"),
    *("--admin-port", "$(DIPTYCH_ADMIN_PORT)"),
    *("--core-port", "$(DIPTYCH_CORE_PORT)"),
    *("--kv-port", "$(DIPTYCH_KV_PORT)"),
]
_ENGINE_API_ARGUMENTS = ["--api-port", "$(DIPTYCH_API_PORT)"]
_ROUTER_COMMAND = ["python", "-m", "diptych_router"]
_ROUTER_ARGUMENTS = [
    *("--config", f"$(DIPTYCH_CONFIG_DIR)/{ROUTER_FILE}"),
    *("--keys", "$(DIPTYCH_KEYS_DIR)"),
    *("--host", "$(DIPTYCH_BIND_HOST)"),
    *("--port", "$(DIPTYCH_HTTP_PORT)"),
    *("--admin-port", "$(DIPTYCH_ADMIN_PORT)"),
    *("--serving", f"{SERVING_DIR}/{SERVING_FILE}"),
    *("--linger-seconds", f"$({LINGER_VARIABLE})"),
    *("--prefill", "$(DIPTYCH_PREFILL_TARGETS)"),
    *("--decode", "$(DIPTYCH_DECODE_TARGETS)"),
]
SCHEME_ANNOTATION = {"prometheus.io/scheme": "https"}
"""How scrapers are told; the chart's PodMonitor and most configurations of Prometheus know it."""

_HEALTH = {"path": "/health", "port": "http"}
_LIVE = {"path": "/live", "port": "http"}
_ENGINE_PROBES: dict[str, Any] = {
    # Ten minutes to load weights; until then neither of the others is asked.
    "startupProbe": {
        "httpGet": _HEALTH, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 300,
    },
    # A program that a starved node keeps waiting is ready all the same: taking it out of service
    # would hand its load to pods that are starved too. Routers notice by themselves who is dead.
    "readinessProbe": {
        "httpGet": _HEALTH, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3,
    },
    # Says no to a dead or stalled core only, never to a busy one.
    "livenessProbe": {
        "httpGet": _LIVE, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6,
    },
}  # fmt: skip
_ROUTER_PROBES: dict[str, Any] = {
    # Starting takes a second on a quiet node and half a minute on one that starts six pods at once.
    "startupProbe": {
        "httpGet": _LIVE, "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 180,
    },
    "readinessProbe": {
        "httpGet": _HEALTH, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 3,
    },
    # /health of a router also speaks of its pools, and no restart of a router heals a pool.
    "livenessProbe": {
        "httpGet": _LIVE, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Pods:
    """One Deployment's worth of pods, before the user's podTemplate is laid over them."""

    role: Role
    part: Pool | Router
    replicas: int
    container: dict[str, Any]
    volumes: list[dict[str, Any]]
    config_hash: str
    model: ModelMount
    revision: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


def engine_deployment(
    service: InferenceService,
    role: Role,
    revision: str,
    replicas: int,
    keys: KeySets,
    config_hash: str,
    model: ModelMount,
) -> dict[str, Any]:
    """One pool of one revision. Raises `SpecError` for a podTemplate that does not fit."""
    pool: Pool = service.spec.prefill if role == "prefill" else service.spec.decode
    transport = service.spec.transfer.transport
    ports = engine_ports(service)
    environment = [
        *_environment(ports),
        _field("NODE_NAME", "spec.nodeName"),
        _field("NODE_ZONE", f"metadata.labels['{ZONE_LABEL}']"),
        *([_variable("UCX_TLS", UCX_TLS[transport])] if transport in UCX_TLS else []),
    ]
    container = {
        "name": "engine",
        "image": service.spec.engine.image,
        "command": _ENGINE_COMMAND,
        "args": [*_ENGINE_ARGUMENTS, *(_ENGINE_API_ARGUMENTS if "api" in ports else [])],
        "env": environment,
        "ports": _container_ports(ports),
        **_ENGINE_PROBES,
        **_resources(pool.resources),
    }
    config = object_name(service, role, revision)
    volumes = [_config_volume("config", config), keys_volume(service, KeySets(keys.current))]
    pods = _Pods(role, pool, replicas, container, volumes, config_hash, model, revision)
    deployment = _deployment(service, pods)
    deployment["metadata"]["labels"][KEYS_LABEL] = keys.current
    return deployment


def router_deployment(
    service: InferenceService,
    replicas: int,
    keys: KeySets,
    config_hash: str,
    model: ModelMount,
) -> dict[str, Any]:
    """The router pods. Raises `SpecError` for a podTemplate that does not fit."""
    router = service.spec.router
    environment = [
        *_environment(ROUTER_PORTS),
        _variable(LINGER_VARIABLE, str(LINGER_SECONDS)),
        _variable("DIPTYCH_PREFILL_TARGETS", dns_target(service, "prefill")),
        _variable("DIPTYCH_DECODE_TARGETS", dns_target(service, "decode")),
    ]
    container = {
        "name": "router",
        "image": router.image,
        "command": _ROUTER_COMMAND,
        "args": [
            *_ROUTER_ARGUMENTS,
            *(("--api-keys", API_KEYS_DIR) if router.api_keys is not None else ()),
            *(("--tls", TLS_DIR) if router.tls is not None else ()),
        ],
        "env": environment,
        "ports": _container_ports(ROUTER_PORTS),
        **(_ROUTER_PROBES if router.tls is None else _over_https(_ROUTER_PROBES)),
        **_resources(router.resources),
    }
    volumes = [
        _config_volume("config", object_name(service, "router")),
        keys_volume(service, keys),
        _config_volume("serving", object_name(service, "serving")),
        *(
            {"name": name, "secret": {"secretName": source.secret_name, "defaultMode": 0o440}}
            for name, source in (("api-keys", router.api_keys), ("tls", router.tls))
            if source is not None
        ),
    ]
    pods = _Pods("router", router, replicas, container, volumes, config_hash, model)
    if router.tls is not None:
        pods = replace(pods, annotations=SCHEME_ANNOTATION)
    deployment = _deployment(service, pods)
    deployment["metadata"]["annotations"] = {
        CURRENT_KEYS_ANNOTATION: keys.current,
        PREVIOUS_KEYS_ANNOTATION: keys.previous,
    }
    return deployment


def _deployment(service: InferenceService, pods: _Pods) -> dict[str, Any]:
    role = pods.role
    template = merge(
        _pod_template(service, pods), pods.part.pod_template, f"spec.{role}.podTemplate"
    )
    selected = _selected(service, pods)
    _check_template(template, selected, pods.container["name"], role)
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


def _selected(service: InferenceService, pods: _Pods) -> dict[str, str]:
    chosen = selector(service, pods.role)
    return chosen | {REVISION_LABEL: pods.revision} if pods.revision else chosen


def _pod_template(service: InferenceService, pods: _Pods) -> dict[str, Any]:
    role = pods.role
    mount_paths = {
        "config": CONFIG_DIR,
        "keys": KEYS_DIR,
        "serving": SERVING_DIR,
        "api-keys": API_KEYS_DIR,
        "tls": TLS_DIR,
    }
    container = pods.container | {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        # A program that fails says why in its last line; status shows it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *(
                {"name": name, "mountPath": mount_paths[name], "readOnly": True}
                for name in (volume["name"] for volume in pods.volumes)
            ),
            {"name": "tmp", "mountPath": "/tmp"},
            *pods.model.volume_mounts,
        ],
    }
    own_labels = metadata(service, role, role, pods.revision)["labels"]
    return {
        "metadata": {
            "labels": own_labels,
            "annotations": {CONFIG_HASH_ANNOTATION: pods.config_hash, **pods.annotations},
        },
        "spec": {
            "serviceAccountName": object_name(service, role),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": LINGER_SECONDS
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
            **({"initContainers": fetchers} if (fetchers := pods.model.init_containers) else {}),
            "containers": [container],
            "volumes": [*pods.volumes, {"name": "tmp", "emptyDir": {}}, *pods.model.volumes],
        },
    }


def _over_https(probes: dict[str, Any]) -> dict[str, Any]:
    """The same probes; the kubelet takes any certificate."""
    return {
        kind: {**probe, "httpGet": {**probe["httpGet"], "scheme": "HTTPS"}}
        for kind, probe in probes.items()
    }


def _config_volume(name: str, config_map: str) -> dict[str, Any]:
    return {"name": name, "configMap": {"name": config_map}}


def _check_template(
    template: dict[str, Any], selected: dict[str, str], container: str, role: Role
) -> None:
    """A podTemplate may change anything but what the rest of the service relies on."""
    field = f"spec.{role}.podTemplate"
    found = (template.get("metadata") or {}).get("labels") or {}
    for label, value in selected.items():
        if found.get(label) != value:
            raise SpecError(f"{field}.metadata.labels", f"{label} must stay {value!r}")
    names = [entry["name"] for entry in (template.get("spec") or {}).get("containers") or []]
    if container not in names:
        raise SpecError(f"{field}.spec.containers", f"the container {container!r} must stay")


def _environment(ports: dict[str, int]) -> list[dict[str, Any]]:
    return [
        _field("POD_NAME", "metadata.name"),
        _field("POD_IP", "status.podIP"),
        _variable("DIPTYCH_CONFIG_DIR", CONFIG_DIR),
        _variable("DIPTYCH_KEYS_DIR", KEYS_DIR),
        _variable(BIND_HOST_VARIABLE, "0.0.0.0"),
        *(_variable(PORT_VARIABLES[name], str(port)) for name, port in ports.items()),
    ]


def _variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> dict[str, Any]:
    """A variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _container_ports(ports: dict[str, int]) -> list[dict[str, Any]]:
    # The protocol is part of a port's identity for server-side apply.
    return [
        {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
    ]


def _resources(resources: Resources) -> dict[str, Any]:
    """Quantities as strings: older API servers take no bare numbers in server-side apply."""
    given = {
        kind: {name: str(amount) for name, amount in amounts.items()}
        for kind, amounts in (("limits", resources.limits), ("requests", resources.requests))
        if amounts
    }
    return {"resources": given} if given else {}
