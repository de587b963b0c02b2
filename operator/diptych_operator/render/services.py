"""The Services: a headless one for each pool, and the one that clients call."""

from __future__ import annotations

from typing import Any

from diptych_operator.api.names import (
    HTTP_PORT,
    Role,
    engine_ports,
    metadata,
    selector,
)
from diptych_operator.api.service import InferenceService


def pool_service(service: InferenceService, role: Role) -> dict[str, Any]:
    """A headless Service whose DNS name resolves to the ready engine pods of one
    pool, for routers."""
    headless = {"clusterIP": "None", "publishNotReadyAddresses": False}
    return _service(service, role, engine_ports(service), headless)


def router_service(service: InferenceService) -> dict[str, Any]:
    """The Service that clients call: the OpenAI API."""
    found = _service(service, "router", {"http": HTTP_PORT}, {"type": "ClusterIP"})
    if service.spec.router.tls is not None:
        found["spec"]["ports"][0] |= {"name": "https", "appProtocol": "https"}
    return found


def _service(
    service: InferenceService, role: Role, ports: dict[str, int], kind: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, role, role),
        "spec": {
            **kind,
            "selector": selector(service, role),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }
