"""Each example is a service that renders."""

from __future__ import annotations

from pathlib import Path

from cases import each
from cluster_kit.crds import EXAMPLES, broken_rules, service_of

from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_operator.render import ServiceSecrets, render
from diptych_protocol import CurveKeys

SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), admin_token="T" * 43)


@each("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_becomes_its_pools_and_a_router(example: Path) -> None:
    service = parse_object(service_of(example), Images())
    deployments = [
        item["metadata"]["labels"]["diptych.dev/role"]
        for item in render(service, SECRETS)
        if item["kind"] == "Deployment"
    ]
    assert sorted(deployments) == ["decode", "prefill", "router"]


@each("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_keeps_the_rules_of_the_api_server(example: Path) -> None:
    assert broken_rules(service_of(example)) == set()
