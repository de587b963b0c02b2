"""The CRDs use nothing that is newer than the oldest Kubernetes that is promised.

Server-side apply refuses a CRD with a field that the API server does not know, and no server as old
as that is at hand: so each construct stands here with the release that brought it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit.charts import OLDEST_MINOR
from cluster_kit.crds import rules_of

from diptych_operator.api.crd import custom_resource_definition, route_definition, scaler_definition

ROOT = Path(__file__).parents[3]
Release = tuple[int, int]

SINCE_1_16 = (1, 16)  # apiextensions.k8s.io/v1 itself
VERSION_FIELDS: dict[str, Release] = {
    **dict.fromkeys(
        ("name", "served", "storage", "schema", "subresources", "additionalPrinterColumns"),
        SINCE_1_16,
    ),
    "selectableFields": (1, 30),
}
SCHEMA_FIELDS: dict[str, Release] = {
    **dict.fromkeys(
        (
            *("type", "description", "properties", "required", "additionalProperties", "items"),
            *("default", "enum", "minimum", "maximum", "minLength", "maxLength", "maxItems"),
            *("minItems", "maxProperties", "pattern", "format", "anyOf", "nullable"),
            *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
            *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
        ),
        SINCE_1_16,
    ),
    "x-kubernetes-map-type": (1, 18),
    "x-kubernetes-validations": (1, 25),
}
RULE_FIELDS: dict[str, Release] = {
    "rule": (1, 25),
    "message": (1, 25),
    "messageExpression": (1, 27),
    "reason": (1, 28),
    "fieldPath": (1, 28),
    "optionalOldSelf": (1, 29),
}
CEL_CALLS: dict[str, Release] = {
    **dict.fromkeys(
        (
            *("has", "all", "exists", "exists_one", "filter", "map", "size"),
            *("startsWith", "endsWith", "matches", "contains", "int", "double", "string"),
        ),
        (1, 25),
    ),
    **dict.fromkeys(("quantity", "isQuantity"), (1, 28)),
    **dict.fromkeys(("ip", "isIP", "cidr", "isCIDR"), (1, 30)),
}
"""Functions and macros. What is missing here: look up since when CRDs may call it."""


OLDEST = (1, OLDEST_MINOR)


@pytest.mark.parametrize("path", ["docs/install.md", "docs/vllm.md", "charts/diptych/README.md"])
def test_documents_ask_for_the_kubernetes_that_the_chart_asks_for(path: str) -> None:
    assert re.findall(r"Kubernetes 1\.(\d+) or later", (ROOT / path).read_text()) == [
        str(OLDEST_MINOR)
    ]


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for child in schema.get("properties", {}).values():
        yield from nodes(child)
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key])


@pytest.fixture(params=[custom_resource_definition, scaler_definition, route_definition])
def version(request: pytest.FixtureRequest) -> dict[str, Any]:
    (version,) = request.param()["spec"]["versions"]
    return dict(version)


def calls(cel: str) -> set[str]:
    """Names before a parenthesis, outside of texts."""
    return set(re.findall(r"(\w+)\(", re.sub(r"r?'[^']*'", "''", cel)))


def test_what_is_no_rule_is_known_to_the_oldest_kubernetes(version: dict[str, Any]) -> None:
    assert {VERSION_FIELDS[field] <= OLDEST for field in version} == {True}
    for node in nodes(version["schema"]["openAPIV3Schema"]):
        assert not [field for field in node if SCHEMA_FIELDS[field] > OLDEST]


def test_rules_are_known_to_the_oldest_kubernetes(version: dict[str, Any]) -> None:
    for _, rule in rules_of(version["schema"]["openAPIV3Schema"]):
        assert not [field for field in rule if RULE_FIELDS[field] > OLDEST], rule
        assert not [name for name in calls(rule["rule"]) if CEL_CALLS[name] > OLDEST], rule


def test_what_takes_longer_the_longer_a_text_is_has_a_longest_text(version: dict[str, Any]) -> None:
    """Old API servers, too, refuse a rule by the most that it could ever cost."""
    for node in nodes(version["schema"]["openAPIV3Schema"]):
        rules = node.get("x-kubernetes-validations", ())
        if any("self.matches(" in rule["rule"] for rule in rules):
            assert node["maxLength"] <= 1024


MOST_OF_A_RULE, MOST_OF_A_CRD = 10_000_000, 100_000_000
"""Estimated costs beyond which API servers refuse a CRD (apiextensions-apiserver)."""


def cost_of_patterns(schema: dict[str, Any], rule: str) -> float:
    """As API servers estimate it: a tenth of the bytes of the longest text, by a quarter of the
    pattern's length, for each item that there may be; a character may have four bytes."""
    cost = 0.0
    for path, pattern in re.findall(r"self([.\w]*)\.exists\(a, a\.matches\('(.*?)'\)\)", rule):
        node = schema
        for name in path.split(".")[1:]:
            node = node["properties"][name]
        longest = 4 * node["items"]["maxLength"] + 1
        cost += node["maxItems"] * math.ceil(0.1 * longest) * math.ceil(0.25 * len(pattern))
    return cost


def test_no_rule_over_the_items_of_a_list_costs_more_than_api_servers_admit(
    version: dict[str, Any],
) -> None:
    costs = [
        cost_of_patterns(node, rule["rule"])
        for node in nodes(version["schema"]["openAPIV3Schema"])
        for rule in node.get("x-kubernetes-validations", ())
    ]
    assert max(costs, default=0) < 0.7 * MOST_OF_A_RULE, "what else a rule does costs little"
    assert sum(costs) < 0.7 * MOST_OF_A_CRD


def test_the_cost_of_a_pattern_is_counted() -> None:
    texts = {"maxItems": 64, "items": {"maxLength": 1024}}
    schema = {"properties": {"a": {"properties": {"b": texts}}}}
    assert cost_of_patterns(schema, "!self.a.b.exists(a, a.matches('^x{1,9}$'))") == 64 * 410 * 2
    assert cost_of_patterns(texts, "!self.exists(a, a.matches('^x$'))") == 64 * 410
