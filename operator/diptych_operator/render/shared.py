"""The objects that a service has once, for all revisions, beside its pods' configuration: accounts
without rights, Services, budgets for evictions, closed ports."""

from __future__ import annotations

from typing import Any

from diptych_operator.api.names import (
    ADMIN_PORT,
    HTTP_PORT,
    OPERATOR_LABELS,
    SERVICE_LABEL,
    Owner,
    Part,
    Role,
    engine_ports,
    metadata,
    router_ports,
    selector,
)
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.cluster import Cluster


def pool_service(service: InferenceService, role: Role) -> dict[str, Any]:
    """A headless Service: its DNS name resolves to the ready engine pods of one pool."""
    headless = {"clusterIP": "None", "publishNotReadyAddresses": False}
    return _service(service, role, engine_ports(service), headless)


def router_service(service: InferenceService) -> dict[str, Any]:
    """The Service that clients call: the OpenAI API."""
    found = api_service(
        service, "router", _public_ports(service), over_https=service.spec.router.tls is not None
    )
    for picker in found["spec"]["ports"][1:]:
        picker["appProtocol"] = "http2"
    return found


def api_service(
    service: Owner, role: Part, ports: dict[str, int], *, over_https: bool
) -> dict[str, Any]:
    """The Service of routers or a route."""
    found = _service(service, role, ports, {"type": "ClusterIP"})
    if over_https:
        found["spec"]["ports"][0] |= {"name": "https", "appProtocol": "https"}
    return found


def _public_ports(service: InferenceService) -> dict[str, int]:
    return {name: port for name, port in router_ports(service).items() if name != "admin"}


def _service(
    service: Owner, role: Part, ports: dict[str, int], kind: dict[str, Any]
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


_NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"


def service_account(service: Owner, role: Part) -> dict[str, Any]:
    """An account without rights or token: pods call each other, but never the Kubernetes API."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, role, role),
        "automountServiceAccountToken": False,
    }


def disruption_budget(service: Owner, role: Part, cluster: Cluster) -> dict[str, Any]:
    """Node drains and the like evict one pod of a pool at a time.

    Not `minAvailable`, with which a pool of one pod would block a node's drain for ever.
    """
    return {
        "apiVersion": cluster.policy_api,
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, role, role),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(service, role)}},
    }


def network_policy(service: InferenceService, role: Role, cluster: Cluster) -> dict[str, Any]:
    """Return the NetworkPolicy of a pool or of the routers.

    Pods of the service reach each other on every port, because UCX listens on ports that it
    chooses. Only the operator reaches the admin port. Anybody reaches a router's API and picker,
    and the port of engines that answers probes and scrapers. The API of an engine has another port,
    which only the service reaches.
    """
    own_pods = {"podSelector": {"matchLabels": {SERVICE_LABEL: service.metadata.name}}}
    operator = {
        "namespaceSelector": {"matchLabels": {_NAMESPACE_NAME_LABEL: cluster.operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR_LABELS},
    }
    public = _public_ports(service) if role == "router" else {"http": HTTP_PORT}
    ingress: list[dict[str, Any]] = [
        {"from": [own_pods]},
        {"ports": [{"port": port, "protocol": "TCP"} for port in public.values()]},
        {"from": [operator], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service, role, role),
        "spec": {
            "podSelector": {"matchLabels": selector(service, role)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
