"""Structured outputs with the real model: what comes has the form that was asked for."""

from __future__ import annotations

import itertools
import json
import re
import select
import string
from typing import Any

import jsonschema
import pydantic
import pytest
from engine_kit.core import CLIENT, DUMMY, core_request, make_core, run, step, tokens
from waits import PATIENCE_S

from diptych_engine import LLM
from diptych_engine.control.core import EngineCore
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import failure_of
from diptych_frontend.text.renderer import TextRenderer
from diptych_frontend.text.structured_outputs import MAX_FORM_BYTES
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    EngineCoreOutput,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from diptych_protocol.wire import ErrorKind

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SHORT = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 10, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,8} \d{2}:\d{2}"
CHOICE = ["maybe", 'so "they" say', "ünlikely\n"]
GRAMMAR = 'start: NUMBER (("+" | "-") NUMBER){2}\nNUMBER: /[0-9]{1,3}/'
EVERY_FORM: list[dict[str, Any]] = [
    {"json": json.dumps(PERSON)},
    {"regex": REGEX},
    {"choice": CHOICE},
    {"grammar": GRAMMAR},
]


@pytest.fixture(scope="module")
def core(smollm2: str) -> EngineCore:
    return make_core(smollm2, max_model_len=512, max_num_batched_tokens=64, weight_packing="auto")


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    tokenizer = load_tokenizer(resolve_model(smollm2))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")


def ask(name: str, prompt: list[int], form: dict[str, Any], **fields: Any) -> Any:
    form_params = StructuredOutputsParams(**form)
    fields = {"max_tokens": 120, "eos_token_id": EOS, **fields}
    return core_request(name, prompt, structured_outputs=form_params, **fields)


def text(tokenizer: Tokenizer, outputs: list[EngineCoreOutput]) -> str:
    """The text of an answer that ended by itself."""
    assert outputs[-1].error is None
    assert outputs[-1].finish_reason is FinishReason.STOP
    return tokenizer.decode(tokens(outputs))


def has_form(answer: str, form: dict[str, Any]) -> bool:
    if "json" in form:
        jsonschema.validate(json.loads(answer), PERSON)
        return True
    if "choice" in form:
        return answer in CHOICE
    pattern = REGEX if "regex" in form else r"\d{1,3}([+-]\d{1,3}){2}"
    return re.fullmatch(pattern, answer) is not None


# --- the form of answers --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_contract_C05_answers_have_the_form(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int], temperature: float
) -> None:
    """Answers of every form are in one batch, beside one that is free."""
    requests = [
        ask(str(i), prompt, form, temperature=temperature, seed=i)
        for i, form in enumerate(EVERY_FORM)
    ]
    free = core_request("free", prompt, max_tokens=8)
    alone = tokens(run(core, free)["free"])
    outputs = run(core, *requests, free)
    for i, form in enumerate(EVERY_FORM):
        assert has_form(text(tokenizer, outputs[str(i)]), form)
    assert tokens(outputs["free"]) == alone


def test_contract_C05_a_json_object_is_one(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    short = {"max_tokens": 200, "logit_bias": {tokenizer.encode("}")[0]: 8.0}}
    [outputs] = run(core, ask("r", prompt, {"json_object": True}, **short)).values()
    assert isinstance(json.loads(text(tokenizer, outputs)), dict)


def test_contract_C05_a_grammar_wins_over_what_else_keeps_tokens_out(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    """min_tokens longer than any answer, every choice a bad word: the answer has its form, and
    ends."""
    bad = [tokenizer.encode(word) for word in ("yes", "no")]
    request = ask("r", prompt, {"choice": ["yes", "no"]}, min_tokens=9, bad_words_token_ids=bad)
    [outputs] = run(core, request).values()
    made = tokens(outputs)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert tokenizer.decode(made) in ("yes", "no")
    assert made[-1] == EOS


def test_contract_C05_min_tokens_lengthens_what_the_form_allows_to_be_longer(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    form = {"regex": "[a-z ]{1,200}"}
    request = ask("r", prompt, form, min_tokens=12, logit_bias={EOS: 100.0})
    [outputs] = run(core, request).values()
    assert tokens(outputs).index(EOS) == 12


def test_contract_C05_whoever_ignores_the_end_gets_nothing_but_ends_after_it(
    core: EngineCore, prompt: list[int]
) -> None:
    request = ask("r", prompt, {"choice": ["yes"]}, ignore_eos=True, max_tokens=6)
    [outputs] = run(core, request).values()
    made = tokens(outputs)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert made[-3:] == [EOS] * 3


def test_contract_C05_a_stop_token_ends_a_form_early(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    [colon] = tokenizer.encode(":")
    [outputs] = run(core, ask("r", prompt, {"regex": REGEX}, stop_token_ids=[colon])).values()
    assert outputs[-1].stop_reason == colon


# --- what ends by itself --------------------------------------------------------------------------

OPEN: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "an integer": ({"type": "integer"}, {"7": 100.0}),
    "a fraction": ({"type": "number", "minimum": 0, "maximum": 9}, {"7": 100.0}),
    "an exponent": ({"type": "number"}, {"7": 100.0, "e": 80.0}),
    "any value": ({"type": "array", "items": {}, "minItems": 1, "maxItems": 1}, {"7": 100.0}),
    "seconds": ({"type": "string", "format": "date-time"}, {"7": 100.0, "0": 80.0, ".": 90.0}),
    "a duration": ({"type": "string", "format": "duration"}, {"7": 100.0}),
    "further properties": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        {",": 100.0},
    ),
    "of a branch": (
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"properties": {"a": {"const": 1}}}}},
        {"{": 100.0, ",": 90.0},
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPEN)
def test_contract_C05_what_no_schema_bounds_ends(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int], name: str
) -> None:
    """A model that would go on for ever with it comes to an end."""
    schema, liked = OPEN[name]
    bias = {tokenizer.encode(text)[0]: by for text, by in liked.items()}
    request = ask("r", prompt, {"json": schema}, max_tokens=90, logit_bias=bias)
    [outputs] = run(core, request).values()
    jsonschema.validate(json.loads(text(tokenizer, outputs)), schema)


class Address(pydantic.BaseModel):
    street: str
    number: int


class Person(pydantic.BaseModel):
    """What instructor and LangChain make a schema of; it says nothing of further properties."""

    name: str
    age: int
    height_in_metres: float
    address: Address | None = None


def test_contract_C05_a_small_model_ends_what_pydantic_describes(
    core: EngineCore, tokenizer: Tokenizer
) -> None:
    asked = "Anna is 34 years old, 1.7 m tall, and lives in Baker Street 12. Describe her in JSON."
    prompt = tokenizer.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
    request = ask("r", prompt, {"json": Person.model_json_schema()}, max_tokens=150)
    Person.model_validate_json(text(tokenizer, run(core, request)["r"]))


def test_contract_C05_digits_in_strings_and_bounds_of_schemas_are_the_callers(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    bias = {tokenizer.encode("7")[0]: 100.0, tokenizer.encode('"')[0]: 50.0}
    digits = {"type": "string", "pattern": "^[0-9]{40}$"}
    for schema, length in (({"type": "string"}, 60), (digits, 42)):
        request = ask("r", prompt, {"json": schema}, max_tokens=60, logit_bias=bias)
        assert len(tokenizer.decode(tokens(run(core, request)["r"]))) == length


# --- where an answer stands is found from its tokens ----------------------------------------------


def test_contract_C05_preemption_in_the_middle_changes_nothing(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    request = ask("r", prompt, {"json": SHORT}, temperature=0.9, seed=5)
    [expected] = run(core, request).values()
    core.add(request, CLIENT)
    outputs: list[EngineCoreOutput] = []
    while not (outputs and outputs[-1].finished):
        outputs += step(core)
        if len(outputs) % 4 == 3:
            core.scheduler.preempt_all()
    assert core.scheduler.stats.num_preemptions > 1
    assert tokens(outputs) == tokens(expected)
    jsonschema.validate(json.loads(text(tokenizer, outputs)), SHORT)


def test_contract_C05_another_engine_goes_on_in_the_middle(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    """As a decode engine does after a prefill engine, or any engine after one that was lost."""
    options = {"temperature": 0.9, "seed": 5}
    made = tokens(run(core, ask("r", prompt, {"json": SHORT}, **options))["r"])
    parts = {str(done): done for done in (1, len(made) // 2, len(made) - 1)}
    requests = [
        ask(name, prompt, {"json": SHORT}, generated_token_ids=made[:done], **options)
        for name, done in parts.items()
    ]
    for name, outputs in run(core, *requests).items():
        assert tokens(outputs) == made[parts[name] :]


def test_contract_C05_output_that_breaks_the_grammar_fails_its_request_alone(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    broken = ask("broken", prompt, {"json": PERSON}, generated_token_ids=tokenizer.encode("Hi"))
    outputs = run(core, broken, ask("sound", prompt, {"choice": CHOICE}))
    assert outputs["broken"][-1].finish_reason is FinishReason.ERROR
    assert "structured output" in (outputs["broken"][-1].error or "")
    assert has_form(text(tokenizer, outputs["sound"]), {"choice": CHOICE})
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks


# --- compiling ------------------------------------------------------------------------------------


def slow_schema(number: int) -> dict[str, Any]:
    """One that takes some 100 ms to compile; each number makes another."""
    limits = [{"type": "integer", "minimum": j, "maximum": 10**6 + number} for j in range(10)]
    inner = {"type": "object", "properties": {f"q{j}": limit for j, limit in enumerate(limits)}}
    return {"type": "object", "properties": {f"p{i}": inner for i in range(90)}}


def test_contract_C05_a_slow_grammar_delays_no_others(core: EngineCore, prompt: list[int]) -> None:
    """While it is compiled, every step brings the others their tokens."""
    core.add(core_request("other", prompt, max_tokens=400, ignore_eos=True), CLIENT)
    while not step(core):
        pass
    core.add(ask("slow", prompt, {"json": slow_schema(1)}, max_tokens=1), CLIENT)
    meanwhile = 0
    while core.scheduler.held:
        outputs = step(core)
        assert outputs[0].request_id == "other"
        meanwhile += 1
    core.abort(["other", "slow"])
    step(core)
    assert meanwhile >= 2


def test_contract_C05_a_core_without_work_is_woken_by_a_grammar(
    core: EngineCore, prompt: list[int]
) -> None:
    core.add(ask("r", prompt, {"json": slow_schema(2)}, max_tokens=1), CLIENT)
    assert not core.has_work
    assert core.stats().num_waiting == 1
    readable, _, _ = select.select([core.grammars.wake_fd], [], [], PATIENCE_S)
    assert readable
    assert core.has_work
    core.take_grammars()
    assert not select.select([core.grammars.wake_fd], [], [], 0.0)[0]
    assert step(core)[0].finish_reason is FinishReason.LENGTH


def test_contract_C05_an_abort_while_compiling_is_the_end(
    core: EngineCore, prompt: list[int]
) -> None:
    core.add(ask("r", prompt, {"json": slow_schema(3)}), CLIENT)
    core.abort(["r"])
    assert select.select([core.grammars.wake_fd], [], [], PATIENCE_S)[0]
    assert [output.finish_reason for output in step(core)] == [FinishReason.ABORT]
    assert not core.has_work
    assert not core.scheduler.requests


def test_contract_C05_answers_of_one_new_form_wait_for_one_grammar(
    core: EngineCore, prompt: list[int]
) -> None:
    """As the n answers to a prompt do."""
    for name in ("a", "b", "c"):
        core.add(ask(name, prompt, {"json": slow_schema(4)}, max_tokens=1), CLIENT)
    core.abort(["b"])
    assert select.select([core.grammars.wake_fd], [], [], PATIENCE_S)[0]
    core.take_grammars()
    assert not core.scheduler.held
    outputs = step(core)
    assert [output.request_id for output in outputs if output.new_token_ids] == ["a", "c"]


def test_contract_C05_a_known_grammar_is_not_compiled_again(
    core: EngineCore, prompt: list[int]
) -> None:
    request = ask("r", prompt, {"regex": "known[0-9]"}, max_tokens=1)
    run(core, request)
    core.add(request, CLIENT)
    assert not core.scheduler.held
    core.abort(["r"])
    step(core)


NAMES = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]


def deep_form(kind: str) -> dict[str, Any]:
    """A form close to the limit in which each part is the next one, for as many parts as fit."""
    if kind == "rules":
        names = NAMES[: MAX_FORM_BYTES // 8 - 4]
        rules = [f"{name}:{after}" for name, after in itertools.pairwise(names)]
        return {"grammar": "\n".join([f"start:{names[0]}", *rules, f'{names[-1]}:"y"'])}
    count = MAX_FORM_BYTES // 60
    chain = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(count)}
    return {"json": {"$ref": "#/$defs/0", "$defs": chain | {f"{count}": {"type": "null"}}}}


@pytest.mark.parametrize("kind", ["rules", "references"])
def test_contract_C05_a_deep_form_kills_nobody(
    core: EngineCore, prompt: list[int], kind: str
) -> None:
    """With the stack of an ordinary thread, the process would be gone."""
    form = deep_form(kind)
    inputs_of(core).process(
        "r", prompt, SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    )
    [outputs] = run(core, ask("r", prompt, form, max_tokens=1)).values()
    assert outputs[-1].error is None


# --- what is refused ------------------------------------------------------------------------------

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "exactly one"),
    ({"regex": ""}, "regex must not be empty"),
    ({"choice": []}, "choice must not be empty"),
    ({"choice": ["a", ""]}, "choice must not be empty"),
    ({"json": "{"}, "truncated"),
    ({"json": {"type": "nonsense"}}, "nonsense"),
    ({"json": {"not": {}}}, "Unimplemented"),
    ({"regex": "(a"}, "unclosed"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"grammar": "start: nowhere"}, "nowhere"),
    ({"choice": ["x" * MAX_FORM_BYTES]}, "at most"),
]


@pytest.mark.parametrize(("form", "reason"), MALFORMED, ids=[str(i) for i in range(len(MALFORMED))])
def test_contract_C05_a_malformed_form_is_refused_on_both_sides(
    core: EngineCore, prompt: list[int], form: dict[str, Any], reason: str
) -> None:
    """By the front-end, naming the field, and by a core that it reaches all the same."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as refusal:
        inputs_of(core).process("r", prompt, params)
    assert (refusal.value.param or "").partition(".")[0] == "structured_outputs"
    [outputs] = run(core, ask("r", prompt, form)).values()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert reason in (outputs[-1].error or "")


def test_contract_C05_a_form_beyond_the_limits_fails_before_its_first_step(
    core: EngineCore, prompt: list[int]
) -> None:
    """What only shows with the vocabulary: a million ways to read the first token."""
    computed = core.scheduler.stats.prompt_tokens_computed
    [outputs] = run(core, ask("r", prompt, {"regex": "(.{1,1000}){1,1000}"})).values()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    refusal = failure_of(outputs[-1])
    assert isinstance(refusal, InvalidRequestError)
    assert "too many" in str(refusal)
    assert refusal.param == "structured_outputs"
    assert core.scheduler.stats.prompt_tokens_computed == computed


def test_contract_C05_a_limit_in_the_middle_of_an_answer_is_the_forms_fault(
    core: EngineCore, prompt: list[int]
) -> None:
    """No engine is to blame, and no other can do it: so the request is refused, not retried."""
    late = "start: BEGIN ways\nBEGIN: /[a-z]{12}/\nways: " + " | ".join(
        f"r{i}" for i in range(3000)
    )
    form: dict[str, Any] = {"grammar": "\n".join([late, *(f'r{i}: "1{i}"' for i in range(3000))])}
    inputs_of(core).process(
        "r", prompt, SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    )
    [outputs] = run(core, ask("r", prompt, form)).values()
    assert len(tokens(outputs)) >= 2
    assert outputs[-1].error_kind is ErrorKind.REFUSED
    refusal = failure_of(outputs[-1])
    assert isinstance(refusal, InvalidRequestError)
    assert "Current row" in str(refusal)
    assert refusal.param == "structured_outputs"


def inputs_of(core: EngineCore) -> InputProcessor:
    source = resolve_model(core.description.compat["model"])
    return InputProcessor(
        TextRenderer(source), max_model_len=512, vocab_size=source.config.vocab_size
    )


def test_an_engine_says_what_its_tokens_are(core: EngineCore) -> None:
    tokenizer = inputs_of(core).renderer.tokenizer
    assert tokenizer is not None
    assert core.description.vocabulary == tokenizer.vocabulary
    assert make_core(DUMMY).description.vocabulary == ""


def test_contract_C05_a_schema_nested_without_end_is_refused(core: EngineCore) -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"items": schema}
    form = StructuredOutputsParams(json=schema)
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        inputs_of(core).process("r", [1], SamplingParams(structured_outputs=form))


def test_contract_C05_a_model_without_a_tokenizer_refuses() -> None:
    core = make_core(DUMMY)
    form = StructuredOutputsParams(choice=["a"])
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        inputs_of(core).process("r", [1], SamplingParams(structured_outputs=form))
    [outputs] = run(core, core_request("r", [1], structured_outputs=form)).values()
    assert "no tokenizer" in (outputs[-1].error or "")


def test_contract_C05_an_engine_without_a_loop_waits_for_its_grammars(smollm2: str) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    with LLM(smollm2, num_blocks=64, num_threads=1) as llm:
        params = SamplingParams(temperature=0.0, structured_outputs=form)
        answers = llm.generate(["Is water wet?", "Is fire cold?"], params, use_tqdm=False)
    assert {answer.outputs[0].text for answer in answers} <= {"yes", "no"}
