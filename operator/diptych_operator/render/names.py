"""Names, labels, ports and paths: what the rendered objects and the programs in them agree on."""

from __future__ import annotations

from typing import Literal

from diptych_operator.api_types import InferenceService

Role = Literal["prefill", "decode", "router"]

SERVICE_LABEL = "diptych.dev/service"
ROLE_LABEL = "diptych.dev/role"
COMPONENT_LABEL = "app.kubernetes.io/component"
CONFIG_HASH_ANNOTATION = "diptych.dev/config-hash"
"""On pod templates, so that a change of configuration rolls the pods."""

HTTP_PORT, CORE_PORT, KV_PORT = 8000, 5557, 5558
ENGINE_PORTS = {"http": HTTP_PORT, "core": CORE_PORT, "kv": KV_PORT}
ROUTER_PORTS = {"http": HTTP_PORT}

PORT_VARIABLES = {
    "http": "DIPTYCH_HTTP_PORT",
    "core": "DIPTYCH_CORE_PORT",
    "kv": "DIPTYCH_KV_PORT",
}
"""The environment variable that carries each named container port to the program."""
BIND_HOST_VARIABLE = "DIPTYCH_BIND_HOST"

CONFIG_DIR = "/etc/diptych/config"
KEYS_DIR = "/etc/diptych/keys"
ENGINE_FILE = "engine.json"
ROUTER_FILE = "router.json"
PUBLIC_KEY_FILE = "curve-public"
SECRET_KEY_FILE = "curve-secret"


def object_name(service: InferenceService, part: str) -> str:
    """Name of a rendered object: at most 40 + 8 characters."""
    return f"{service.metadata.name}-{part}"


def selector(service: InferenceService, role: Role) -> dict[str, str]:
    """The labels that pick exactly the pods of one role; they never change."""
    return {SERVICE_LABEL: service.metadata.name, ROLE_LABEL: role}


def labels(service: InferenceService, component: str) -> dict[str, str]:
    """The recommended Kubernetes labels and our own service label."""
    return {
        "app.kubernetes.io/name": "diptych",
        "app.kubernetes.io/instance": service.metadata.name,
        COMPONENT_LABEL: component,
        "app.kubernetes.io/managed-by": "diptych",
        SERVICE_LABEL: service.metadata.name,
    }


def dns_target(service: InferenceService, role: Role) -> str:
    """`host:port` whose A records are the ready engine cores of one pool."""
    host = f"{object_name(service, role)}.{service.metadata.namespace}.svc"
    return f"{host}:{CORE_PORT}"
