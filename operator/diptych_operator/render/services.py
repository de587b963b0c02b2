"""The Services: a headless one for each pool, and the one that clients call."""

from __future__ import annotations

from typing import Any

from diptych_operator.api_types import InferenceService
from diptych_operator.render.names import (
    ENGINE_PORTS,
    ROUTER_PORTS,
    Role,
    labels,
    object_name,
    selector,
)


def pool_service(service: InferenceService, role: Role) -> dict[str, Any]:
    """Its DNS name resolves to the ready engine pods of one pool: how routers find them."""
    headless = {"clusterIP": "None", "publishNotReadyAddresses": False}
    return _service(service, role, ENGINE_PORTS, headless)


def router_service(service: InferenceService) -> dict[str, Any]:
    """The service's front door: the OpenAI API."""
    return _service(service, "router", ROUTER_PORTS, {"type": "ClusterIP"})


def _service(
    service: InferenceService, role: Role, ports: dict[str, int], kind: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": object_name(service, role),
            "namespace": service.metadata.namespace,
            "labels": labels(service, role) | selector(service, role),
        },
        "spec": {
            **kind,
            "selector": selector(service, role),
            "ports": [
                {"name": name, "port": port, "targetPort": name} for name, port in ports.items()
            ],
        },
    }
