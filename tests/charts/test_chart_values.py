"""Values: each described, each checked, and refused with words that help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cluster_kit.charts import CHART, Helm

from diptych_operator.upgrades import PATTERN

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in the schema that names its properties."""
    if "properties" in schema:
        yield path, schema
        for name, child in schema["properties"].items():
            yield from objects(child, f"{path}.{name}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")


def test_every_object_is_closed_and_every_value_described() -> None:
    for path, schema in objects(SCHEMA):
        # What `global` holds, other charts decide as well.
        assert schema.get("additionalProperties", True) is (path == ".global"), path
        for name, child in schema["properties"].items():
            assert len(child.get("description", "")) > 10, f"{path}.{name}"


def test_schema_and_defaults_know_the_same_values() -> None:
    def same(schema: dict[str, Any], values: dict[str, Any]) -> None:
        assert schema["properties"].keys() == values.keys()
        for name, value in values.items():
            if "properties" in schema["properties"][name]:
                same(schema["properties"][name], value)

    same(SCHEMA, DEFAULTS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 3}, ("replica", "not allowed")),
        ({"images": {"name": "x"}}, ("images", "name", "not allowed")),
        ({"image": {"tag": "x"}}, ("image", "not allowed")),
        ({"images": {"engine": {"repository": "x:1"}}}, ("repository", "pattern")),
        ({"monitoring": {"podMonitor": {"on": True}}}, ("podMonitor", "on", "not allowed")),
        ({"replicas": "two"}, ("replicas", "integer")),
        ({"replicas": 0}, ("replicas", "1")),
        ({"scope": "everything"}, ("scope", "cluster", "namespaced")),
        ({"namespaces": "team-a"}, ("namespaces", "array")),
        ({"namespaces": ["Team_A"]}, ("namespaces", "pattern")),
        ({"namespaces": ["a", "a"]}, ("namespaces", "items")),
        ({"images": {"operator": {"digest": "sha256:1"}}}, ("digest", "pattern")),
        ({"images": {"pullPolicy": "Sometimes"}}, ("pullPolicy", "Always")),
        ({"operator": {"maxConcurrentRollouts": -1}}, ("maxConcurrentRollouts", "0")),
        (
            {"operator": {"rolloutWindows": ["Sat 01:00-05:00"]}},
            ("rolloutWindows", "pattern"),
        ),
        ({"logLevel": "loud"}, ("logLevel", "debug")),
        ({"resources": {"limits": {"memory": "much"}}}, ("memory", "pattern")),
        ({"podLabels": {"a": 1}}, ("podLabels", "string")),
        ({"crds": {"keep": "yes"}}, ("keep", "boolean")),
        # They would never match.
        ({"limits": {"allow": {"hostPaths": ["/data/"]}}}, ("hostPaths", "pattern")),
        ({"limits": {"allow": {"cacheHostPaths": ["models"]}}}, ("cacheHostPaths", "pattern")),
        ({"limits": {"allow": {"images": ["ghcr.io/"]}}}, ("images", "pattern")),
        (
            {"limits": {"allow": {"credentialHosts": ["https://a.example"]}}},
            ("credentialHosts", "pattern"),
        ),
    ],
    ids=lambda part: json.dumps(part) if isinstance(part, dict) else "",
)
def test_a_wrong_value_is_refused_by_name(
    helm: Helm, values: dict[str, Any], words: tuple[str, ...]
) -> None:
    refusal = helm.refusal(values)
    assert all(word in refusal for word in words), refusal


def test_windows_are_refused_as_the_operator_refuses_them() -> None:
    told = SCHEMA["properties"]["operator"]["properties"]["rolloutWindows"]["items"]
    assert told == {"type": "string", "pattern": PATTERN}


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"scope": "namespaced"}, "list the namespaces"),
        ({"namespaces": ["team-a"]}, "add --set scope=namespaced"),
        ({"serviceAccount": {"create": False}}, "name the ServiceAccount"),
    ],
    ids=lambda part: json.dumps(part) if isinstance(part, dict) else "",
)
def test_values_that_contradict_each_other_are_refused_with_a_remedy(
    helm: Helm, values: dict[str, Any], remedy: str
) -> None:
    assert remedy in helm.refusal(values)


def test_the_chart_may_be_a_part_of_another(helm: Helm) -> None:
    """Helm puts `global` into the values of every subchart."""
    assert helm.render({"global": {"registry": "example.org"}})
