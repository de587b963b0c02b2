"""What `spec.expose.gateway` asks for: a route of a Gateway, to the routers by their picker."""

from __future__ import annotations

from typing import Any

from diptych_operator.api.base import Object, Raw
from diptych_operator.api.names import HTTP_PORT, PICKER_PORT, metadata, object_name, selector
from diptych_operator.api.service import Gateway, InferenceService
from diptych_operator.kube.cluster import HTTP_ROUTE_API, HTTP_ROUTE_KIND, POOL_API, POOL_KIND


def gateway_objects(service: InferenceService, gateway: Gateway) -> list[Object]:
    """Return the InferencePool of the routers, and the HTTPRoute to it."""
    about = metadata(service, "router", "router")
    pool: Object = {
        "apiVersion": POOL_API,
        "kind": POOL_KIND,
        "metadata": about,
        "spec": {
            "selector": {"matchLabels": selector(service, "router")},
            "targetPorts": [{"number": HTTP_PORT}],
            "endpointPickerRef": {
                "kind": "Service",
                "name": object_name(service, "router"),
                "port": {"number": PICKER_PORT},
                # Every router can take every request, whoever picks it.
                "failureMode": "FailOpen",
            },
        },
    }
    parent = {"name": gateway.name, "namespace": gateway.namespace or service.metadata.namespace}
    backend = {"group": POOL_API.partition("/")[0], "kind": POOL_KIND, "name": about["name"]}
    route: Object = {
        "apiVersion": HTTP_ROUTE_API,
        "kind": HTTP_ROUTE_KIND,
        "metadata": about,
        "spec": {
            "parentRefs": [parent],
            **({"hostnames": [gateway.hostname]} if gateway.hostname else {}),
            # Streams last as long as their answers.
            "rules": [{"backendRefs": [backend], "timeouts": {"request": "0s"}}],
        },
    }
    return [pool, route]


def why_not_exposed(service: InferenceService, has_gateways: bool, route: Raw | None) -> str:
    """Return why requests to the Gateway do not arrive, and what to do; empty if they should.

    route: the HTTPRoute as the cluster has it; None: it has none yet.
    """
    gateway = service.spec.expose.gateway
    if gateway is None:
        return ""
    if not has_gateways:
        return (
            f"the cluster has no {HTTP_ROUTE_API} {HTTP_ROUTE_KIND} or no {POOL_API} {POOL_KIND}, "
            "or the operator may not watch them; install the CRDs of the Gateway API and of its "
            "inference extension, and wait up to five minutes"
        )
    if service.spec.router.tls is not None:
        return (
            "gateways speak HTTP to an InferencePool; leave spec.router.tls out, and let the "
            "Gateway serve HTTPS"
        )
    status: dict[str, Any] = (route or {}).get("status") or {}
    for parent in status.get("parents") or ():
        for condition in parent.get("conditions") or ():
            if condition["type"] in ("Accepted", "ResolvedRefs") and condition["status"] == "False":
                said = f"{condition['reason']}: {condition['message']}"
                return f"the Gateway {gateway.name} says {said}; correct the Gateway or the spec"
    return ""
