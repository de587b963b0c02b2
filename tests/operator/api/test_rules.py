"""The rules of the CRD, in CEL and in Python, judge the same objects in the same words."""

from __future__ import annotations

from typing import Any

import pytest
from cases import each
from cluster_kit.crds import (
    BROKEN,
    GOOD,
    SCHEMA,
    Broken,
    broken_rules,
    inference_service,
    rules_of,
    says_one_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_operator.api.base import SpecError
from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_protocol.model_uri import parse_model_uri


def complaint(service: dict[str, Any]) -> tuple[str, str] | None:
    """What Python says of a service: the field, and what is wrong with it."""
    try:
        parse_object(service, Images())
    except SpecError as exc:
        return exc.field, exc.problem
    return None


@each("spec", GOOD.values(), ids=GOOD.keys())
def test_a_good_service_breaks_no_rule(spec: dict[str, Any]) -> None:
    service = inference_service(spec)
    assert broken_rules(service) == set()
    assert complaint(service) is None


@each("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_is_told_alike_by_cel_and_by_python(broken: Broken) -> None:
    service = inference_service(broken.spec)
    assert broken_rules(service) == {broken.at_server}
    assert complaint(service) == (broken.field, broken.rule.message)


def test_each_rule_of_the_crd_is_broken_by_some_service_here() -> None:
    in_the_crd = {(".".join(path), rule["rule"]) for path, rule in rules_of(SCHEMA)}
    broken_here = {(broken.at_server[0], broken.rule.cel) for broken in BROKEN.values()}
    assert in_the_crd == broken_here


def test_of_several_faults_python_names_one_that_cel_names_too() -> None:
    service = inference_service(
        {"rollout": {"maxSurge": 0}, "transfer": {"leaseSeconds": 61}, "model": {"uri": "s3://"}}
    )
    assert len(broken_rules(service)) == 3
    assert says_one_of(complaint(service), broken_rules(service))


counts = st.integers(0, 3)
scaling = st.fixed_dictionaries(
    {"minReplicas": counts, "maxReplicas": st.integers(1, 3)},
    optional={
        "by": st.sampled_from(["Operator", "External"]),
        "attainment": st.floats(0.5, 0.999),
    },
)
pools = st.fixed_dictionaries({}, optional={"replicas": st.integers(1, 3), "autoscaling": scaling})
checksums = st.sampled_from(["", "0" * 64])
arguments = st.sampled_from(
    ["--dtype=a", "--seed=1", "--port=1", "--mode", "--modelled=1", "--conf.a=1", "--kv-s=1"]
)
engines = st.fixed_dictionaries(
    {},
    optional={
        "runtime": st.sampled_from(["diptych", "vllm"]),
        "image": st.sampled_from(["", "example.org/engine:1"]),
        "args": st.lists(arguments, max_size=2),
        "tensorParallelSize": st.integers(1, 3),
        "dtype": st.sampled_from(["auto", "bfloat16"]),
        "maxNumSeqs": st.sampled_from([1, 3, 64]),
        "maxNumBatchedTokens": st.sampled_from([1, 3, 512]),
    },
)
gpus = st.dictionaries(
    st.sampled_from(["cpu", "nvidia.com/gpu", "amd.com/gpu"]), st.sampled_from([1, "2", 3])
)
models = st.fixed_dictionaries(
    {"uri": st.sampled_from(["dummy://", "hf://a/b", "hf://a/b/c.gguf", "s3://a/b", "pvc://a/b"])},
    optional={"revision": st.sampled_from(["", "main"]), "sha256": checksums},
)
prefill_engines = st.fixed_dictionaries(
    {},
    optional={
        "args": st.lists(arguments, max_size=1),
        "tensorParallelSize": st.integers(1, 3),
        "image": st.just("example.org/engine:2"),
    },
)
prefill_pools = pools | st.fixed_dictionaries(
    {"engine": prefill_engines, "resources": st.fixed_dictionaries({"limits": gpus})}
)
specs = st.fixed_dictionaries(
    {
        "model": models,
        "prefill": prefill_pools | st.none(),
        "decode": pools
        | st.fixed_dictionaries({"resources": st.fixed_dictionaries({"limits": gpus})}),
    },
    optional={
        "router": st.fixed_dictionaries({"holdSeconds": counts}),
        "slo": st.fixed_dictionaries(
            {}, optional={"ttftMs": st.integers(1, 9), "interTokenMs": st.integers(1, 9)}
        ),
        "rollout": st.fixed_dictionaries({"maxSurge": counts, "maxUnavailable": counts}),
        "transfer": st.fixed_dictionaries(
            {"leaseSeconds": st.floats(1, 4)},
            optional={
                "connector": st.sampled_from(["diptych", "nixl", "none"]),
                "connectorImage": st.sampled_from(["", "example.org/connector:1"]),
            },
        ),
        "availability": st.fixed_dictionaries({"drainSeconds": st.integers(1, 4)}),
        "engine": engines,
    },
)


@pytest.mark.parametrize("services", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_cel_and_python_agree_on_any_service(services: int) -> None:
    @settings(max_examples=services)
    @given(spec=specs)
    def agree(spec: dict[str, Any]) -> None:
        service = inference_service(spec)
        broken, said = broken_rules(service), complaint(service)
        assert says_one_of(said, broken) if broken else said is None

    agree()


pieces = st.sampled_from(
    ["a", "b.gguf", ".", "..", "...", "/", "//", "@", ":", "?", "#", "\\", "-", "_", "é"]
)
schemes = st.sampled_from(["hf", "s3", "https", "pvc", "oci", "package", "file", "dummy"])


@settings(max_examples=400)
@given(scheme=schemes, rest=st.lists(pieces, max_size=8).map("".join))
def test_what_the_rules_admit_the_programs_can_read(scheme: str, rest: str) -> None:
    uri = f"{scheme}://{rest}"
    if complaint(inference_service({"model": {"uri": uri}})) is None:
        assert parse_model_uri(uri).scheme == scheme


def test_a_port_that_does_not_exist_is_found_without_cel() -> None:
    service = inference_service({"model": {"uri": "https://host:99999/f.gguf"}})
    assert complaint(service) == (
        "spec.model.uri",
        "'https://host:99999/f.gguf' is not of the form https://HOST/FILE.gguf",
    )
