"""Which arguments of vLLM a service may give."""

from __future__ import annotations

from cases import each
from cluster_kit.crds import inference_service, vllm_spec

from diptych_operator.api.base import Rule, SpecError
from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_operator.api.vllm_arguments import (
    ARGUMENT_RULES,
    EQUAL_ARGUMENTS,
    EQUAL_IN_BOTH,
    OWNED_ARGUMENTS,
)


def is_refused(argument: str) -> bool:
    try:
        parse_object(inference_service(vllm_spec(engine={"args": [argument]})), Images())
    except SpecError:
        return True
    return False


@each("ending", ["", "=1", ".a=1", ".a.b+=1"])
@each(
    ("rule", "name"),
    [
        (rule, name)
        for rules, groups in (
            (ARGUMENT_RULES, OWNED_ARGUMENTS),
            (EQUAL_IN_BOTH, EQUAL_ARGUMENTS),
        )
        for rule, names in zip(rules, groups.values(), strict=True)
        for name in names
    ],
)
def test_a_rule_sees_a_name_each_of_its_beginnings_and_parts_of_its_value(
    rule: Rule, name: str, ending: str
) -> None:
    """A name with a star stands for all that begin so. A beginning that is a whole name with a
    rule of its own, such as `--model`, is left to that."""
    whole = name.replace("*", "further")
    for length in range(1, len(whole) + 1):
        argument = f"--{whole[:length]}{ending}"
        assert not all(each.kept([argument]) for each in (rule, *ARGUMENT_RULES)), argument
        assert rule.kept([f"--x{argument[2:]}"]), "a name that only ends so is another"
    assert not rule.kept([f"--{whole}{ending}"])


@each(
    "argument",
    [
        "--tokenizer-mode=slow", "--model-impl=vllm", "--hf-overrides={}", "--seed=7",
        "--config-format=hf", "--disable-log-stats-of-nothing", "--kv-cache-dtype=fp8",
        "--enable-sleep-mode", "--max-model-len=1024", "--compilation-config.mode=0",
        "--additional-config={\"port\": 1}", "--no-enable-prefix-caching", "--ssl",
    ],
)  # fmt: skip
def test_only_what_is_owned_is_refused(argument: str) -> None:
    """`--ssl` is the beginning of several names that are owned."""
    assert is_refused(argument) == (argument == "--ssl")


@each(
    "argument",
    [
        "--tensor_parallel_size=2", "--kv_transfer_config={}", "--tensor-parallel_size=2",
        "--kv_t.kv_role=a", "-tp=2", "--Host=a", "--additional-config.a", "--a b", "a", "--",
        "--.a=1",
    ],
)  # fmt: skip
def test_other_forms_are_no_arguments_here(argument: str) -> None:
    """To vLLM an underscore is a dash, and a part of a JSON argument that has no value of its own
    takes the next argument for it, which may be the operator's."""
    assert is_refused(argument)
