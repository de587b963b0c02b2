"""Each example is a service that renders."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from crd_kit import broken_rules

from diptych_operator.parse import parse
from diptych_operator.render import ServiceSecrets, render
from diptych_protocol import CurveKeys

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), admin_token="T" * 43)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_becomes_two_pools_and_a_router(example: Path) -> None:
    service = parse(example.read_text())
    deployments = [
        item["metadata"]["labels"]["diptych.dev/role"]
        for item in render(service, SECRETS)
        if item["kind"] == "Deployment"
    ]
    assert sorted(deployments) == ["decode", "prefill", "router"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_keeps_the_rules_of_the_api_server(example: Path) -> None:
    assert broken_rules(yaml.safe_load(example.read_text())) == set()
