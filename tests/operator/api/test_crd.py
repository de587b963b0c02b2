"""The CRD file is what the types say, and it follows the rules of API servers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from cases import each
from cluster_kit.charts import load_script
from cluster_kit.crds import (
    EXAMPLES,
    SCHEMA,
    inference_service,
    nodes,
    rules_of,
    service_of,
    strict,
    with_defaults,
)

from diptych_operator.api.base import camel_case, snake_case
from diptych_operator.api.crd import (
    CRD_FOLDER,
    custom_resource_definition,
    generated,
    route_definition,
    scaler_definition,
)
from diptych_operator.api.engine import Engine
from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_operator.api.router import Router
from diptych_protocol import (
    EngineConfig,
    EngineSettings,
    KVTransferConfig,
    RouterConfig,
    RouterSettings,
)

ROOT = Path(__file__).parents[3]
VERSION = custom_resource_definition()["spec"]["versions"][0]
SCALER_VERSION = scaler_definition()["spec"]["versions"][0]
SCALER_SCHEMA: dict[str, Any] = SCALER_VERSION["schema"]["openAPIV3Schema"]
ROUTE_SCHEMA = route_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
all_kinds = pytest.mark.parametrize(
    "schema", [SCHEMA, SCALER_SCHEMA, ROUTE_SCHEMA], ids=["service", "scaler", "route"]
)
LIMITS = (
    "minimum", "maximum", "maxLength", "pattern", "minItems", "maxItems", "maxProperties", "enum",
)  # fmt: skip
STRUCTURAL_KEYWORDS = {
    "type", "description", "properties", "required", "additionalProperties", "items", "default",
    "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "maxProperties", "pattern", "format", "anyOf", "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
}  # fmt: skip


def test_the_files_are_up_to_date_with_the_types() -> None:
    pages = load_script(ROOT / "docs" / "reference_pages.py").generated()
    for path, text in (generated() | pages).items():
        assert (ROOT / path).read_text() == text, "run: make crds"
    crds = {path.relative_to(ROOT) for path in (ROOT / CRD_FOLDER).glob("*.yaml")}
    assert crds <= generated().keys()


def test_the_file_stays_far_below_the_limit_of_client_side_apply() -> None:
    """It keeps the object as JSON in an annotation of 256 KiB at most."""
    for path, text in generated().items():
        if path.suffix == ".yaml":
            kept = json.dumps(yaml.safe_load(text), separators=(",", ":"))
            print(f"{path}: {len(text)} bytes, {len(kept)} as JSON")
            assert max(len(text.encode()), len(kept)) < 96 << 10


def test_what_the_file_says_once_stands_in_every_place_where_it_holds() -> None:
    for definition in (custom_resource_definition(), scaler_definition(), route_definition()):
        plural = definition["spec"]["names"]["plural"]
        (text,) = (text for path, text in generated().items() if f"_{plural}." in path.name)
        assert yaml.safe_load(text) == definition


@pytest.mark.parametrize(("settings", "part"), [(EngineSettings, Engine), (RouterSettings, Router)])
def test_a_setting_has_the_same_limits_and_default_wherever_it_is_given(
    settings: type[msgspec.Struct], part: type[msgspec.Struct]
) -> None:
    said = msgspec.json.schema(settings)["$defs"][settings.__name__]["properties"]
    spec = SCHEMA["properties"]["spec"]["properties"][part.__name__.lower()]["properties"]
    for name, field in said.items():
        (one,) = (option for option in field.get("anyOf", [field]) if option != {"type": "null"})
        shown = spec[camel_case(name)]
        for limit in LIMITS:
            assert shown.get(limit) == one.get(limit), (name, limit)
        default = getattr(part(), name)
        assert (snake_case(default) if name == "policy" else default) == getattr(settings(), name)


@pytest.mark.parametrize(
    ("part", "name", "configs"),
    [
        ("transfer", "verify", (RouterConfig,)),
        ("transfer", "lease_seconds", (KVTransferConfig,)),
        ("availability", "drain_seconds", (EngineConfig, RouterConfig)),
    ],
)
def test_a_setting_among_others_has_the_same_meaning_and_most(
    part: str, name: str, configs: tuple[type[msgspec.Struct], ...]
) -> None:
    """The least may differ: a pod has a second or more."""
    shown = SCHEMA["properties"]["spec"]["properties"][part]["properties"][camel_case(name)]
    for config in configs:
        said = msgspec.json.schema(config)["$defs"][config.__name__]["properties"][name]
        for key in ("description", "maximum", "enum"):
            assert said.get(key) == shown.get(key)


@all_kinds
def test_every_node_follows_the_rules_of_structural_schemas(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        assert node.keys() <= STRUCTURAL_KEYWORDS, path
        assert not (node.keys() >= {"properties", "additionalProperties"}), path
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        else:
            assert node["type"] in ("object", "array", "string", "integer", "number", "boolean")
            assert "anyOf" not in node, path
        if "default" in node:
            jsonschema.validate(node["default"], {**node, "required": []})


@all_kinds
def test_every_field_of_spec_and_status_is_explained(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        if path != "metadata":  # Kubernetes forbids it there and explains metadata itself.
            assert node.get("description", "").endswith("."), path


def test_what_a_rule_looks_at_is_bounded() -> None:
    """API servers refuse rules that could become too expensive."""
    for path, _ in rules_of(SCHEMA):
        node = SCHEMA
        for name in path:
            node = node["properties"][name]
        for inner_path, inner in nodes(node):
            if inner.get("type") == "array":
                assert "maxItems" in inner, inner_path
            if isinstance(inner.get("additionalProperties"), dict):
                assert "maxProperties" in inner, inner_path
            if inner.get("type") == "string":
                assert inner.keys() & {"maxLength", "pattern", "enum"}, inner_path


@all_kinds
def test_the_status_has_no_defaults_because_the_operator_writes_what_it_means(
    schema: dict[str, Any],
) -> None:
    assert not [path for path, node in nodes(schema["properties"]["status"]) if "default" in node]


def test_a_default_keeps_the_rules_that_stand_beside_it() -> None:
    """API servers judge a default before they fill in the defaults within it."""
    engine = SCHEMA["properties"]["spec"]["properties"]["engine"]
    assert engine["default"] == with_defaults({}, engine)


def test_the_crd_has_the_defaults_of_the_types() -> None:
    service = inference_service({"decode": {"autoscaling": {"maxReplicas": 2}}})
    completed = with_defaults(service, SCHEMA)
    assert completed["spec"]["engine"]["blockSize"] == 16
    assert parse_object(completed, Images()) == parse_object(service, Images())


def test_it_has_a_status_subresource_a_short_name_and_columns() -> None:
    names = custom_resource_definition()["spec"]["names"]
    assert names["shortNames"] == ["infsvc"]
    assert "categories" not in names, "`kubectl delete all --all` must spare services"
    assert VERSION["subresources"] == {"status": {}}
    columns = VERSION["additionalPrinterColumns"]
    assert [column["name"] for column in columns if column["priority"] == 0] == [
        "Model", "Prefill", "Decode", "KV", "Available", "Revision", "Age",
    ]  # fmt: skip
    assert [column["name"] for column in columns if column["priority"] == 1] == [
        "URL", "Access", "Reason",
    ]  # fmt: skip


def test_a_scaler_has_the_three_paths_of_a_scale_and_a_size_that_is_always_there() -> None:
    names = scaler_definition()["spec"]["names"]
    assert (names["kind"], names["shortNames"]) == ("PoolScaler", ["psc"])
    assert SCALER_VERSION["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    assert SCALER_SCHEMA["required"] == ["spec"]
    assert SCALER_SCHEMA["properties"]["spec"]["required"] == ["replicas"]
    columns = [column["name"] for column in SCALER_VERSION["additionalPrinterColumns"]]
    assert columns == ["Service", "Pool", "Wanted", "Ready", "Age"]


@pytest.mark.parametrize("version", [VERSION, SCALER_VERSION], ids=["service", "scaler"])
def test_each_column_and_each_scale_path_shows_a_field_that_exists(version: dict[str, Any]) -> None:
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    for json_path in paths:
        path = re.sub(r"\[\?[^\]]*\]", "", json_path).strip(".").split(".")
        node = version["schema"]["openAPIV3Schema"]
        for name in path if path[0] != "metadata" else []:
            node = node.get("items", node)["properties"][name]
        assert node["type"] in ("string", "object", "integer")


@each(
    "wrong",
    [
        {"prefill": {"replicas": 0}},
        {"prefill": {"replicas": 1, "replica": 1}},
        {"prefill": {"podTemplate": {"spec": {"containers": [{"image": "a"}]}}}},
        {"decode": {"autoscaling": {"minReplicas": 1}}},
        {"decode": {"autoscaling": {"maxReplicas": 2, "queuedTokensPerReplica": 5}}},
        {"decode": {"autoscaling": {"maxReplicas": 2, "by": "external"}}},
        {"decode": {"autoscaling": {"maxReplicas": 2, "attainment": 95}}},
        {"decode": {"autoscaling": {"maxReplicas": 2, "attainment": 1.0}}},
        {"model": {"uri": "ftp://x"}},
        {"model": {"uri": "dummy://", "cache": {"hostPath": "models"}}},
        {"engine": {"blockSize": 3}},
        {"engine": {"kvCacheMemory": "1GB"}},
        {"transfer": {"transport": "ucx"}},
        {"transfer": {"verify": "required"}},
        {"rollout": {"maxSurge": -1}},
        {"decode": {"replicas": 1, "resources": {"limits": {"cpu": 0.5}}}},
    ],
    ids=str,
)
def test_wrong_objects_do_not_pass(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(inference_service(wrong), strict(SCHEMA))


def test_a_right_object_passes() -> None:
    right = inference_service({"prefill": {"podTemplate": {"spec": {"nodeSelector": None}}}})
    jsonschema.validate(right, strict(SCHEMA))


@each("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_pass(example: Path) -> None:
    jsonschema.validate(service_of(example), strict(SCHEMA))


def test_the_full_example_shows_every_field() -> None:
    text = (ROOT / "examples" / "full.yaml").read_text()
    for path, _ in nodes(SCHEMA["properties"]["spec"]):
        if path and "podTemplate." not in path and not path.endswith("[]"):
            name = path.rpartition(".")[2]
            assert re.search(rf"\b{name}:", text), path
