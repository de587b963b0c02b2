"""The Deployments: two pools of engines, and the router."""

from __future__ import annotations

from typing import Any

from diptych_operator.api_types import InferenceService, Pool, Resources, Router
from diptych_operator.errors import SpecError
from diptych_operator.render.merge import merge
from diptych_operator.render.names import (
    BIND_HOST_VARIABLE,
    CONFIG_DIR,
    CONFIG_HASH_ANNOTATION,
    ENGINE_FILE,
    ENGINE_PORTS,
    KEYS_DIR,
    PORT_VARIABLES,
    ROUTER_FILE,
    ROUTER_PORTS,
    Role,
    dns_target,
    labels,
    object_name,
    selector,
)

USER_ID = 10001
GRACE_SECONDS = 60
"""From SIGTERM to SIGKILL; streams that run may end within it."""

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
    *("--host", "$(DIPTYCH_BIND_HOST)"),
    *("--advertise-host", "$(POD_IP)"),
    *("--port", "$(DIPTYCH_HTTP_PORT)"),
    *("--core-port", "$(DIPTYCH_CORE_PORT)"),
    *("--kv-port", "$(DIPTYCH_KV_PORT)"),
]
_ROUTER_COMMAND = ["python", "-m", "diptych_router"]
_ROUTER_ARGUMENTS = [
    *("--config", f"$(DIPTYCH_CONFIG_DIR)/{ROUTER_FILE}"),
    *("--keys", "$(DIPTYCH_KEYS_DIR)"),
    *("--host", "$(DIPTYCH_BIND_HOST)"),
    *("--port", "$(DIPTYCH_HTTP_PORT)"),
    *("--prefill", "$(DIPTYCH_PREFILL_TARGETS)"),
    *("--decode", "$(DIPTYCH_DECODE_TARGETS)"),
]

_HEALTH = {"path": "/health", "port": "http"}
_ENGINE_PROBES: dict[str, Any] = {
    # Ten minutes to load weights; until then neither of the others is asked.
    "startupProbe": {
        "httpGet": _HEALTH, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 300,
    },
    "readinessProbe": {
        "httpGet": _HEALTH, "periodSeconds": 5, "timeoutSeconds": 2, "failureThreshold": 2,
    },
    "livenessProbe": {
        "httpGet": _HEALTH, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6,
    },
}  # fmt: skip
_ROUTER_PROBES: dict[str, Any] = {
    "readinessProbe": {
        "httpGet": _HEALTH, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2,
    },
    # /health of a router also speaks of its pools, and no restart of a router heals a pool.
    "livenessProbe": {
        "tcpSocket": {"port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5,
        "failureThreshold": 3,
    },
}  # fmt: skip


def engine_deployment(
    service: InferenceService, role: Role, pool: Pool, config_hash: str
) -> dict[str, Any]:
    """One pool of engines. Raises `SpecError` for a podTemplate that does not fit."""
    transport = service.spec.transfer.transport
    environment = [
        *_environment(ENGINE_PORTS),
        *([_variable("UCX_TLS", UCX_TLS[transport])] if transport in UCX_TLS else []),
    ]
    container = {
        "name": "engine",
        "image": service.spec.engine.image,
        "command": _ENGINE_COMMAND,
        "args": _ENGINE_ARGUMENTS,
        "env": environment,
        "ports": _container_ports(ENGINE_PORTS),
        **_ENGINE_PROBES,
        **_resources(pool.resources),
    }
    return _deployment(service, role, pool, container, config_hash)


def router_deployment(service: InferenceService, config_hash: str) -> dict[str, Any]:
    """The router pods. Raises `SpecError` for a podTemplate that does not fit."""
    router = service.spec.router
    environment = [
        *_environment(ROUTER_PORTS),
        _variable("DIPTYCH_PREFILL_TARGETS", dns_target(service, "prefill")),
        _variable("DIPTYCH_DECODE_TARGETS", dns_target(service, "decode")),
    ]
    container = {
        "name": "router",
        "image": router.image,
        "command": _ROUTER_COMMAND,
        "args": _ROUTER_ARGUMENTS,
        "env": environment,
        "ports": _container_ports(ROUTER_PORTS),
        **_ROUTER_PROBES,
        **_resources(router.resources),
    }
    return _deployment(service, "router", router, container, config_hash)


def _deployment(
    service: InferenceService,
    role: Role,
    part: Pool | Router,
    container: dict[str, Any],
    config_hash: str,
) -> dict[str, Any]:
    template = merge(
        _pod_template(service, role, container, config_hash),
        part.pod_template,
        f"spec.{role}.podTemplate",
    )
    _check_template(template, selector(service, role), container["name"], role)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": object_name(service, role),
            "namespace": service.metadata.namespace,
            "labels": labels(service, role) | selector(service, role),
        },
        "spec": {
            "replicas": part.replicas,
            "selector": {"matchLabels": selector(service, role)},
            "template": template,
        },
    }


def _pod_template(
    service: InferenceService, role: Role, container: dict[str, Any], config_hash: str
) -> dict[str, Any]:
    container = container | {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
            {"name": "keys", "mountPath": KEYS_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    return {
        "metadata": {
            "labels": labels(service, role) | selector(service, role),
            "annotations": {CONFIG_HASH_ANNOTATION: config_hash},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "config", "configMap": {"name": object_name(service, role)}},
                {
                    "name": "keys",
                    # Readable for the group of the pod (fsGroup) and for nobody else.
                    "secret": {"secretName": object_name(service, "curve"), "defaultMode": 0o440},
                },
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


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
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        _variable("DIPTYCH_CONFIG_DIR", CONFIG_DIR),
        _variable("DIPTYCH_KEYS_DIR", KEYS_DIR),
        _variable(BIND_HOST_VARIABLE, "0.0.0.0"),
        *(_variable(PORT_VARIABLES[name], str(port)) for name, port in ports.items()),
    ]


def _variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _container_ports(ports: dict[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _resources(resources: Resources) -> dict[str, Any]:
    given = {"limits": dict(resources.limits), "requests": dict(resources.requests)}
    given = {kind: amounts for kind, amounts in given.items() if amounts}
    return {"resources": given} if given else {}
