"""`spec.expose.gateway` in a real cluster: what is made of it once the cluster has the kinds, how a
Gateway's verdict reaches the status, and what is said before.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs of this version, and those of a Gateway API (`cluster_kit.apply_crds`).
"""

from __future__ import annotations

from functools import partial

import pytest
from chaos_kit.namespaces import KUBECONFIG, Namespace, Object, until
from cluster_kit.operators import STUCK, Identity, Operator, running, without_rights

from diptych_operator.kube.cluster import HTTP_ROUTE_KIND, POOL_KIND

pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster with the CRDs"
)
GATEWAY = {"name": "front", "namespace": "infra", "hostname": "llm.example"}


def verdict(route: Object, status: str) -> Object:
    told = {
        "type": "Accepted", "status": status, "reason": "NotAllowed", "message": "no such listener",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    parent = {"parentRef": route["spec"]["parentRefs"][0], "controllerName": "example/gateways"}
    return {"status": {"parents": [parent | {"conditions": [told]}]}}


def test_a_route_and_a_pool_are_kept_by_an_operator_that_may(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("gateway")
    with Namespace("gateway") as namespace:
        identity = Identity(namespace, folder)
        operator = partial(Operator, arguments=identity.arguments, kubeconfig=identity.kubeconfig)
        namespace.serve("svc", expose={"gateway": GATEWAY}, **STUCK)
        with (
            without_rights(namespace, "httproutes", "inferencepools"),
            running(operator(folder / "before")),
        ):
            message = namespace.degraded("svc", "GatewayUnavailable")
            assert "inference.networking.k8s.io/v1" in message
            assert "install the CRDs" in message
            until("all else goes on", lambda: namespace.get("Deployment", "svc-router"))
        with running(operator(folder / "after")):
            route = until("a route", lambda: namespace.get(HTTP_ROUTE_KIND, "svc-router"))
            assert route is not None
            pool = namespace.there(POOL_KIND, route["spec"]["rules"][0]["backendRefs"][0]["name"])
            for made in (route, pool):
                [owner] = made["metadata"]["ownerReferences"]
                assert owner["name"] == "svc"
            until("it is well", lambda: reason(namespace) not in ("", "GatewayUnavailable"))
            namespace.merge(HTTP_ROUTE_KIND, "svc-router", verdict(route, "False"), "status")
            message = namespace.degraded("svc", "GatewayUnavailable")
            assert "front says NotAllowed: no such listener" in message
            namespace.merge(HTTP_ROUTE_KIND, "svc-router", verdict(route, "True"), "status")
            until("it is accepted", lambda: reason(namespace) != "GatewayUnavailable")
            namespace.delete(HTTP_ROUTE_KIND, "svc-router")
            until("it is back", lambda: uid(namespace) not in ("", route["metadata"]["uid"]))
            namespace.merge("InferenceService", "svc", {"spec": {"expose": None}})
            for kind in (HTTP_ROUTE_KIND, POOL_KIND):
                until(f"no {kind}", lambda kind=kind: not namespace.get(kind, "svc-router"))  # type: ignore[misc]


def reason(namespace: Namespace) -> str:
    return str(namespace.condition("svc", "Degraded").get("reason", ""))


def uid(namespace: Namespace) -> str:
    found = namespace.get(HTTP_ROUTE_KIND, "svc-router")
    return "" if found is None else str(found["metadata"]["uid"])
