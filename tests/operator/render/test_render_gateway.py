"""What `spec.expose.gateway` becomes, and what the status says where it becomes nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml
from cases import each

from diptych_operator.api.base import Object, Raw
from diptych_operator.api.parse import parse
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.cluster import Cluster
from diptych_operator.render import KeySets, render_shared
from diptych_operator.render.gateway import why_not_exposed
from diptych_protocol import RouterConfig
from diptych_protocol.router_settings import Serving

GATEWAY = {"name": "front", "namespace": "infra", "hostname": "llm.example"}


def service(gateway: dict[str, str] | None = GATEWAY, **spec: Any) -> InferenceService:
    parts = {"model": {"uri": "dummy://"}, "prefill": {}, "decode": {}, **spec}
    parts["expose"] = {} if gateway is None else {"gateway": gateway}
    raw = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "models"},
        "spec": parts,
    }
    return parse(yaml.safe_dump(raw))


def rendered(owner: InferenceService, **cluster: bool) -> dict[tuple[str, str], Object]:
    objects = render_shared(owner, Cluster(**cluster), KeySets("keys"), Serving())  # type: ignore[arg-type]
    return {(obj["kind"], obj["metadata"]["name"]): obj for obj in objects}


def test_a_route_leads_from_the_gateway_to_a_pool_of_the_routers_that_pick() -> None:
    objects = rendered(service())
    route = objects["HTTPRoute", "svc-router"]["spec"]
    assert route["parentRefs"] == [{"name": "front", "namespace": "infra"}]
    assert route["hostnames"] == ["llm.example"]
    [rule] = route["rules"]
    [backend] = rule["backendRefs"]
    assert rule["timeouts"] == {"request": "0s"}
    pool = objects[backend["kind"], backend["name"]]
    assert pool["apiVersion"].startswith(backend["group"])

    pods = objects["Deployment", "svc-router"]["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    [router] = pods["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [ports["http"]]
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["failureMode"] == "FailOpen"
    doors = objects[picker["kind"], picker["name"]]["spec"]["ports"]
    [door] = [door for door in doors if door["port"] == picker["port"]["number"]]
    assert ports[door["targetPort"]] == 9002
    assert "--picker-port" in router["args"]
    assert "$(POD_IP)" in router["args"]
    opened = {
        port["port"]
        for rule in objects["NetworkPolicy", "svc-router"]["spec"]["ingress"]
        if "from" not in rule
        for port in rule["ports"]
    }
    assert opened == {ports["http"], ports["picker"]}


@pytest.mark.parametrize(("hostname", "known"), [("llm.example", True), ("*.example", False)])
def test_routers_answer_under_the_hosts_name_if_it_is_one(hostname: str, known: bool) -> None:
    files = rendered(service({"name": "front", "hostname": hostname}))["ConfigMap", "svc-router"]
    config = msgspec.json.decode(files["data"]["router.json"], type=RouterConfig)
    assert (hostname in config.allowed_hosts) == known


def test_a_gateway_without_a_namespace_is_beside_the_service() -> None:
    route = rendered(service({"name": "front"}))["HTTPRoute", "svc-router"]["spec"]
    assert route["parentRefs"] == [{"name": "front", "namespace": "models"}]
    assert "hostnames" not in route


def test_nothing_of_it_is_rendered_unasked_or_where_its_kinds_are_missing() -> None:
    kinds = {"HTTPRoute", "InferencePool"}
    assert not kinds & {kind for kind, _ in rendered(service(None))}
    assert not kinds & {kind for kind, _ in rendered(service(), has_gateways=False)}
    [router] = rendered(service(None))["Deployment", "svc-router"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert "--picker-port" not in router["args"]


def route(**conditions: str) -> Raw:
    told = [
        {"type": kind, "status": status, "reason": "Because", "message": "of this"}
        for kind, status in conditions.items()
    ]
    return {"status": {"parents": [{"conditions": told}]}}


@each(
    ("owner", "has_gateways", "found", "words"),
    [
        (service(), True, None, ""),
        (service(), True, {}, ""),
        (service(), True, route(Accepted="True", ResolvedRefs="True"), ""),
        (service(), True, route(Accepted="True", ResolvedRefs="False"), "front says Because: of"),
        (service(), True, route(Accepted="False"), "correct the Gateway or the spec"),
        (service(), False, None, "install the CRDs"),
        (service(router={"tls": {"secretName": "x"}}), True, None, "leave spec.router.tls out"),
        (service(None), False, None, ""),
    ],
)
def test_what_keeps_requests_away_is_said_with_its_remedy(
    owner: InferenceService, has_gateways: bool, found: Raw | None, words: str
) -> None:
    said = why_not_exposed(owner, has_gateways, found)
    assert words in said
    assert bool(words) == bool(said)
