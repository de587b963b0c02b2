"""The CRD file is what the types say, and it is what an API server accepts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from diptych_operator.crd import CRD_FILE, crd_yaml, custom_resource_definition

ROOT = Path(__file__).parents[2]
VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
STRUCTURAL_KEYWORDS = {
    "type", "description", "properties", "required", "additionalProperties", "items", "default",
    "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "format", "anyOf",
    "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
}  # fmt: skip


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    children = [*schema.get("properties", {}).values()]
    children += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    for child in children:
        yield from nodes(child)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as kubectl applies it: with unknown fields refused instead of pruned."""
    schema = copy.deepcopy(schema)
    for node in list(nodes(schema)):
        if "properties" in node:
            node["additionalProperties"] = False
    schema["properties"]["metadata"].pop("additionalProperties")
    return schema


def test_the_file_is_up_to_date_with_the_types() -> None:
    assert (ROOT / CRD_FILE).read_text() == crd_yaml(), "run: python -m diptych_operator.crd"


def test_the_file_stays_far_below_the_limit_of_client_side_apply() -> None:
    assert len(crd_yaml()) < 64_000


def test_every_node_follows_the_rules_of_structural_schemas() -> None:
    for node in nodes(SCHEMA):
        assert node.keys() <= STRUCTURAL_KEYWORDS
        assert not (node.keys() >= {"properties", "additionalProperties"})
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        else:
            assert node["type"] in ("object", "array", "string", "integer", "number", "boolean")
            assert "anyOf" not in node
        if "default" in node:
            jsonschema.validate(node["default"], {**node, "required": []})


def test_the_spec_explains_every_field() -> None:
    for node in nodes(SCHEMA["properties"]["spec"]):
        for name, child in node.get("properties", {}).items():
            assert child.get("description"), name


def test_it_has_a_status_subresource_a_short_name_and_columns() -> None:
    names = custom_resource_definition()["spec"]["names"]
    assert names["shortNames"] == ["infsvc"]
    assert VERSION["subresources"] == {"status": {}}
    columns = {column["name"] for column in VERSION["additionalPrinterColumns"]}
    assert columns >= {"Prefill", "Decode", "Available", "Age"}


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_examples_pass(example: Path) -> None:
    jsonschema.validate(yaml.safe_load(example.read_text()), strict(SCHEMA))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": {"replicas": 0}},
        {"prefill": {}},
        {"prefill": {"replicas": 1, "replica": 1}},
        {"model": {"uri": "hf://x"}},
        {"engine": {"blockSize": 3}},
        {"engine": {"kvCacheMemory": "1GB"}},
        {"transfer": {"transport": "ucx"}},
        {"decode": {"replicas": 1, "resources": {"limits": {"cpu": 0.5}}}},
    ],
    ids=str,
)
def test_wrong_objects_do_not_pass(wrong: dict[str, Any]) -> None:
    service = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    service["spec"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, strict(SCHEMA))
