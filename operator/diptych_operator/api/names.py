"""Names, labels, ports and paths on which the rendered objects and the programs in them agree."""

from __future__ import annotations

from typing import Any, Literal

from diptych_operator.api.route import ModelRoute
from diptych_operator.api.service import InferenceService
from diptych_protocol.config import Connector

Role = Literal["prefill", "decode", "router"]
Part = Role | Literal["route"]
"""What pods do: in a service, and those of a ModelRoute."""
Owner = InferenceService | ModelRoute
"""What the operator makes objects for."""
POOLS: tuple[Role, Role] = ("prefill", "decode")
ROLES: tuple[Role, ...] = (*POOLS, "router")

MANAGED_BY_LABEL, MANAGED_BY = "app.kubernetes.io/managed-by", "diptych"
SERVICE_LABEL = "diptych.dev/service"
ROUTE_SUFFIX = ".route"
"""Ends the value of that label, and the key, of a ModelRoute: no service's name has a dot."""
ROLE_LABEL = "diptych.dev/role"
REVISION_LABEL = "diptych.dev/revision"
KEYS_LABEL = "diptych.dev/keys"
"""On Deployments: the Secret of the service that their pods hold."""
KEYS_VOLUME = "keys"
"""The volume of that Secret."""
TLS_VOLUME = "tls"
"""The volume of the Secret of a router's, or a route's, certificate."""
ZONE_LABEL = "topology.kubernetes.io/zone"
"""Kubernetes copies it from a node to the pods that it binds to the node, by default from version
1.35 on (`PodTopologyLabelsAdmission`)."""
ROTATE_ANNOTATION = "diptych.dev/rotate-secrets"
"""On an InferenceService: any new value requests new keys."""
UPGRADE_ANNOTATION = "diptych.dev/upgrade"
"""On an InferenceService: any new value takes what this operator renders otherwise, now."""
RENDERED_ANNOTATION = "diptych.dev/rendered"
"""On the router's Deployment: what the pods were rendered for, see `upgrades`."""
APPLIED_ANNOTATION = "diptych.dev/applied"
"""On every child: a digest of what was last applied."""
INSTANCE_LABEL, COMPONENT_LABEL = "app.kubernetes.io/instance", "app.kubernetes.io/component"
PREFETCH_SUFFIX = "-prefetch"
"""Ends the component of pods that fetch ahead for a pool."""
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
"""An annotation of Kubernetes: of two ready pods, the one with the lower cost is removed first."""
CURRENT_KEYS_ANNOTATION = "diptych.dev/current-keys"
PREVIOUS_KEYS_ANNOTATION = "diptych.dev/previous-keys"
"""On the router's Deployment: the key sets that its pods hold."""
ENGINE_ANNOTATION = "diptych.dev/engine"
"""On pods that fetch ahead: the configuration of the engines that they fetch for."""
CONFIG_HASH_ANNOTATION = "diptych.dev/config-hash"
"""On pod templates, so that a change of configuration replaces the pods."""

HTTP_PORT, API_PORT, ADMIN_PORT, CORE_PORT, KV_PORT = 8000, 8001, 8081, 5557, 5558
ENGINE_PORTS = {"http": HTTP_PORT, "admin": ADMIN_PORT, "core": CORE_PORT, "kv": KV_PORT}
ENGINE_API_PORTS = {"api": API_PORT}
"""The further ports, by name, of engines that have an OpenAI API of their own."""
VLLM_PORTS = {"http": API_PORT, "core": CORE_PORT}
"""Port numbers of an engine pod that runs vLLM, by their names. vLLM has one HTTP server for its
API, its health and its metrics."""
HANDOFF_PORTS: dict[Connector, dict[str, int]] = {
    "none": {},
    "nixl": {"nixl": 5600},
    "diptych": {"kv": KV_PORT},
}
"""The further ports of vLLM's pods, by how they hand KV over. The ports behind that of the hinge
are for further ranks."""
ROUTER_PORTS = {"http": HTTP_PORT, "admin": ADMIN_PORT}
PICKER_PORT = 9002
"""Where routers answer gateways, by gRPC."""

BATCHES_VOLUME = "batches"
"""The volume of router pods that keeps the files and batches of clients."""
PORT_VARIABLES = {
    "http": "DIPTYCH_HTTP_PORT",
    "api": "DIPTYCH_API_PORT",
    "admin": "DIPTYCH_ADMIN_PORT",
    "core": "DIPTYCH_CORE_PORT",
    "kv": "DIPTYCH_KV_PORT",
    "nixl": "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "picker": "DIPTYCH_PICKER_PORT",
}
"""The environment variable that carries a named container port to the program."""
BIND_HOST_VARIABLE = "DIPTYCH_BIND_HOST"
LINGER_VARIABLE = "DIPTYCH_LINGER_SECONDS"
"""The variable that says how long a router that is told to end still accepts new requests."""

OPERATOR_LABELS = {"app.kubernetes.io/name": "diptych-operator"}
"""Labels of pods in the operator's namespace that may call admin ports."""

MODEL_CONTAINER = "model"
"""The init container that downloads the model into the pod's cache, or the model's volume."""
DRAFT_MODEL_CONTAINER = "draft-model"
"""The same of the model that guesses tokens."""
DRAFT_MODEL_FIELD = "spec.engine.speculativeConfig.model"
CONNECTOR_CONTAINER = "connector"
"""The init container that brings our connector into pods of vLLM, and the volume that it fills."""
CONNECTOR_DIR = "/opt/diptych/vllm"
"""Where our connector is: in the image that has it, and in pods of vLLM."""

CONFIG_DIR = "/etc/diptych/config"
KEYS_DIR = "/etc/diptych/keys"
SERVING_DIR = "/etc/diptych/serving"
API_KEYS_DIR = "/etc/diptych/api-keys"
TLS_DIR = "/etc/diptych/tls"
CERTIFICATES_DIR = "/etc/diptych/certificates"
BATCHES_DIR = "/var/lib/diptych/batches"
ENGINE_FILE = "engine.json"
ROUTER_FILE = "router.json"
ROUTE_FILE = "route.json"
SERVING_FILE = "serving.json"
PUBLIC_KEY_FILE = "curve-public"
SECRET_KEY_FILE = "curve-secret"


def engine_ports(service: InferenceService) -> dict[str, int]:
    """Return the port numbers of an engine pod by their names."""
    if service.spec.engine.runtime == "vllm":
        ranks = 1
        if service.connector == "diptych":
            # Each rank has a hinge that listens behind that of the rank before. What a pool has
            # more than the other does no harm there.
            ranks = max(service.engine_of(pool).tensor_parallel_size for pool in service.pools)
        further = {f"kv-{rank}": KV_PORT + rank for rank in range(1, ranks)}
        return VLLM_PORTS | HANDOFF_PORTS[service.connector] | further
    asked = service.spec.network.engine_api == "OwnPods"
    return ENGINE_PORTS | ENGINE_API_PORTS if asked else ENGINE_PORTS


def router_ports(service: InferenceService) -> dict[str, int]:
    """Return the port numbers of a router pod by their names."""
    asked = service.spec.expose.gateway is not None
    return ROUTER_PORTS | {"picker": PICKER_PORT} if asked else ROUTER_PORTS


def object_name(service: Owner, part: str, revision: str = "") -> str:
    """Return the name of a rendered object: at most 40 + 8 + 9 characters."""
    name = f"{service.metadata.name}-{part}"
    return f"{name}-{revision}" if revision else name


def mark(service: Owner) -> str:
    """Return the value of the service label, and the name in the key, of an owner."""
    name = service.metadata.name
    return name if isinstance(service, InferenceService) else name + ROUTE_SUFFIX


def selector(service: Owner, role: Part) -> dict[str, str]:
    """Return the labels that select exactly the pods of one role. They never change."""
    return {SERVICE_LABEL: mark(service), ROLE_LABEL: role}


def metadata(service: Owner, part: str, component: str, revision: str = "") -> dict[str, Any]:
    """Return the name, namespace and labels of a rendered object."""
    marks = labels(service, component)
    if component in (*ROLES, "route"):
        marks[ROLE_LABEL] = component
    if revision:
        marks[REVISION_LABEL] = revision
    return {
        "name": object_name(service, part, revision),
        "namespace": service.metadata.namespace,
        "labels": marks,
    }


def labels(service: Owner, component: str) -> dict[str, str]:
    """Return the recommended Kubernetes labels and our own service label."""
    return {
        "app.kubernetes.io/name": "diptych",
        INSTANCE_LABEL: service.metadata.name,
        COMPONENT_LABEL: component,
        MANAGED_BY_LABEL: MANAGED_BY,
        SERVICE_LABEL: mark(service),
    }


def dns_target(service: InferenceService, role: Role) -> str:
    """Return the `host:port` whose A records are the ready engines of one pool; empty if the
    service has no such pool."""
    if role not in service.pools:
        return ""
    host = f"{object_name(service, role)}.{service.metadata.namespace}.svc"
    return f"{host}:{CORE_PORT}"


def roles(service: InferenceService) -> tuple[Role, ...]:
    """Return the kinds of pods that a service has."""
    return (*service.pools, "router")
