"""A pair that does not fit together cannot be written; what is refused is explained at once."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml
from cases import each
from cluster_kit.crds import SCHEMA, broken_rules, inference_service, says_one_of

from diptych_operator.api.base import SpecError
from diptych_operator.api.parse import parse

SPEC = SCHEMA["properties"]["spec"]["properties"]
POOLS = ("prefill", "decode")
SHARED = [
    (part, name) for part in ("model", "engine", "transfer") for name in SPEC[part]["properties"]
]
MAY_DIFFER = {"replicas", "autoscaling", "resources", "podTemplate", "podTemplateRemove"}


def refusal(service: dict[str, Any]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse(yaml.safe_dump(service))
    return caught.value


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_has_no_field_for_anything_that_must_be_equal(pool: str) -> None:
    own = {"engine"} if pool == "prefill" else set()  # with rules of its own, for vLLM alone
    assert SPEC[pool]["properties"].keys() == MAY_DIFFER | own
    assert not MAY_DIFFER & {name for _, name in SHARED}


@each("pool", POOLS)
@each(("part", "name"), SHARED, ids=lambda value: value)
def test_a_setting_written_into_one_pool_is_sent_to_where_it_holds_for_both(
    pool: str, part: str, name: str
) -> None:
    error = refusal(
        inference_service({pool: {name: SPEC[part]["properties"][name].get("default")}})
    )
    assert error.field == f"spec.{pool}.{name}"
    assert (
        error.problem == f"unknown field; it stands in spec.{part}, where it holds for both pools"
    )


@pytest.mark.parametrize("pool", POOLS)
def test_the_back_door_of_a_pod_template_is_shut_for_the_engines_image(pool: str) -> None:
    other = {"spec": {"containers": [{"name": "engine", "image": "example.org/engine:2"}]}}
    service = inference_service({pool: {"podTemplate": other}})
    jsonschema.validate(service, SCHEMA)
    error = refusal(service)
    assert str(error) == (
        f"spec.{pool}.podTemplate: must not set the image of the container engine: it is "
        "spec.engine.image, equal in both pools (or spec.prefill.engine.image, where vLLM runs)"
    )
    (broken,) = broken_rules(service)
    assert says_one_of((error.field, error.problem), {broken})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"transfer": {"leaseSeconds": 300}},
            "spec.availability.drainSeconds: must be at least transfer.leaseSeconds: a prefill pod "
            "may not leave while its blocks can still be read",
        ),
        (
            {"decode": {"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}},
            "spec: autoscaling.minReplicas must be 0 in both pools or in none: one pool alone "
            "cannot serve",
        ),
        (
            {"prefill": {"replicas": 2, "autoscaling": {"maxReplicas": 4}}},
            "spec.prefill: give replicas or autoscaling, not both",
        ),
        (
            {"rollout": {"maxSurge": 0, "maxUnavailable": 0}},
            "spec.rollout: maxSurge and maxUnavailable cannot both be 0: no pod could ever be "
            "replaced",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pools_that_could_not_work_together_are_refused_with_the_reason(
    spec: dict[str, Any], message: str
) -> None:
    service = inference_service(spec)
    error = refusal(service)
    assert str(error) == message
    (broken,) = broken_rules(service)
    assert says_one_of((error.field, error.problem), {broken})
