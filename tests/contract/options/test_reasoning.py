"""Reasoning and structured outputs in a real engine: the form is that of the answer alone.

The model of the tests was not trained to reason. `forced` makes it all the same: biases and bad
words leave it no other way through `<think> wonder</think>`, if it is free to go it.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine_kit.core import CLIENT, core_request, make_core, run, step, tokens

from diptych_engine.control.core import EngineCore
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.reasoning.formats import FORMATS
from diptych_frontend.reasoning.parser import ReasoningParser
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputsParams,
)

EOS = 2
CHOICE = ["yes", "no"]
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ASSISTANT = "<|im_start|>user\nWill it rain?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    tokenizer = load_tokenizer(resolve_model(smollm2))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def core(smollm2: str) -> EngineCore:
    return thinking_core(smollm2, "think")


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(ASSISTANT)


@pytest.fixture(scope="module")
def forced(tokenizer: Tokenizer) -> dict[str, Any]:
    """Sampling parameters with which the model reasons, if it may."""
    words = ("<", "</", "think", ">", " wonder")
    one, close, think, end, wonder = (tokenizer.encode(word)[0] for word in words)
    return {
        "logit_bias": {wonder: 100.0, close: 80.0, think: 60.0, end: 40.0, one: 20.0},
        "bad_words_token_ids": [
            [wonder, wonder], [close, close], [close, wonder], [think, close], [think, think],
            [think, wonder],
        ],
    }  # fmt: skip


def thinking_core(model: str, parser: str) -> EngineCore:
    return make_core(model, max_model_len=512, weight_packing="auto", reasoning_parser=parser)


def ask(name: str, prompt: list[int], **fields: Any) -> EngineCoreRequest:
    form = StructuredOutputsParams(choice=CHOICE)
    fields = {"max_tokens": 40, "eos_token_id": EOS, "structured_outputs": form, **fields}
    return core_request(name, prompt, **fields)


def said(tokenizer: Tokenizer, outputs: list[EngineCoreOutput]) -> str:
    """The text of an output that ended by itself."""
    assert outputs[-1].error is None
    assert outputs[-1].finish_reason is FinishReason.STOP
    return tokenizer.decode(tokens(outputs))


def alone(core: EngineCore, request: EngineCoreRequest) -> list[EngineCoreOutput]:
    [outputs] = run(core, request).values()
    return outputs


def test_contract_C05_a_form_begins_after_the_reasoning(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int], forced: dict[str, Any]
) -> None:
    """Among requests that do not reason, and one that has no form."""
    requests = {
        "reasons": ask("reasons", prompt, **forced),
        "answers": ask("answers", prompt),
        "ended": ask("ended", prompt, reasoning_ended=True, **forced),
        "free": core_request("free", prompt, max_tokens=9, **forced),
    }
    outputs = run(core, *requests.values())
    reasoning, _, answer = said(tokenizer, outputs["reasons"]).partition("</think>")
    assert reasoning == "<think> wonder"
    assert answer in CHOICE
    assert said(tokenizer, outputs["answers"]) in CHOICE
    assert said(tokenizer, outputs["ended"]) in CHOICE
    for name, request in requests.items():
        assert tokens(alone(core, request)) == tokens(outputs[name])


@pytest.mark.parametrize(
    ("tail", "options", "reasons"),
    [
        ("<think>\n", {}, True),
        ("", {"reasoning_ended": False}, True),
        ("<think>\n", {"reasoning_ended": True}, False),
        ("<think>\n\n</think>\n\n", {}, False),
        ("", {"reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": False}}}, 0),
        ("", {"reasoning_parser_kwargs": {"chat_template_kwargs": {"thinking": False}}}, False),
        ("", {"reasoning_parser_kwargs": {"chat_template_kwargs": {"thinking": True}}}, None),
    ],
)
def test_contract_C05_the_request_and_its_prompt_say_whether_reasoning_has_begun(
    core: EngineCore,
    tokenizer: Tokenizer,
    forced: dict[str, Any],
    tail: str,
    options: dict[str, Any],
    reasons: bool | None,
) -> None:
    request = ask("r", tokenizer.encode(ASSISTANT + tail), **forced, **options)
    reasoning, _, answer = said(tokenizer, alone(core, request)).rpartition("</think>")
    assert answer in CHOICE
    assert reasoning == ("<think> wonder" if reasons is None else " wonder" if reasons else "")


def test_contract_C05_what_a_user_writes_opens_no_reasoning(
    core: EngineCore, tokenizer: Tokenizer
) -> None:
    """Only the end of a prompt counts, which is the template's. The model itself may repeat the
    marker, which this one is kept from."""
    prompt = tokenizer.encode(ASSISTANT.replace("rain?", "rain? <think>"))
    bias = {tokenizer.encode("<")[0]: -100.0}
    assert said(tokenizer, alone(core, ask("r", prompt, logit_bias=bias))) in CHOICE


def test_contract_C05_an_output_that_reasons_does_not_end_without_its_answer(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    made = alone(core, ask("r", prompt, reasoning_ended=False, logit_bias={EOS: 100.0}))
    assert made[-1].finish_reason is FinishReason.LENGTH
    assert EOS not in tokens(made)


def test_contract_C05_a_form_that_begins_like_a_marker_is_kept(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    """The tokens after the first decide whether it was the marker's or the form's."""
    form = StructuredOutputsParams(choice=["<b>", "<a>"])
    made = said(tokenizer, alone(core, ask("r", prompt, structured_outputs=form)))
    assert made in ("<b>", "<a>")
    marker = tokenizer.encode("<think>")
    held = ask("r", prompt, structured_outputs=form, generated_token_ids=marker[:1])
    bias = {marker[1]: 100.0}
    taken = alone(core, core_request("t", prompt, structured_outputs=form, logit_bias=bias,
                                     generated_token_ids=marker[:1], max_tokens=3))  # fmt: skip
    assert tokens(taken)[:2] == marker[1:]
    assert said(tokenizer, alone(core, held)) in ("b>", "a>")


def test_contract_C05_a_token_may_end_the_marker_and_begin_the_answer(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    """In a model whose markers are ordinary text."""
    form = StructuredOutputsParams(choice=["<b>", "<a>"])
    made = tokenizer.encode("<think> wonder</think><")
    assert tokenizer.token_text(made[-1]) == "><"
    request = ask("r", prompt, structured_outputs=form, generated_token_ids=made)
    assert said(tokenizer, alone(core, request)) in ("b>", "a>")


# --- where an output stands is found from its tokens ----------------------------------------------


def test_contract_C05_reasoning_survives_preemption(
    core: EngineCore, prompt: list[int], forced: dict[str, Any]
) -> None:
    request = ask("r", prompt, **forced)
    expected = tokens(alone(core, request))
    core.add(request, CLIENT)
    outputs: list[EngineCoreOutput] = []
    while not (outputs and outputs[-1].finished):
        outputs += step(core)
        if len(outputs) % 2:
            core.scheduler.preempt_all()
    assert core.scheduler.stats.num_preemptions >= 4
    assert tokens(outputs) == expected


def test_contract_C05_another_engine_goes_on_with_the_reasoning(
    core: EngineCore, prompt: list[int], forced: dict[str, Any]
) -> None:
    """As a decode engine does after a prefill engine, or any engine after one that was lost."""
    made = tokens(alone(core, ask("r", prompt, **forced)))
    requests = [
        ask(str(done), prompt, generated_token_ids=made[:done], **forced)
        for done in range(1, len(made))
    ]
    for name, outputs in run(core, *requests).items():
        assert tokens(outputs) == made[int(name) :]


# --- the other format -----------------------------------------------------------------------------


def test_contract_C05_a_form_begins_with_the_final_channel(
    smollm2: str, tokenizer: Tokenizer
) -> None:
    core = thinking_core(smollm2, "harmony")
    prompt = tokenizer.encode(ASSISTANT)

    def after(text: str, **options: Any) -> list[EngineCoreOutput]:
        made = tokenizer.encode(text)
        return alone(core, ask("r", prompt, generated_token_ids=made, **options))

    assert said(tokenizer, after(ANALYSIS + FINAL)) in CHOICE
    assert said(tokenizer, after(FINAL)) in CHOICE
    assert said(tokenizer, alone(core, ask("r", prompt))) in CHOICE
    [free] = tokenizer.encode(" wonder")
    for text in (ANALYSIS[:-20], ANALYSIS, f"{ANALYSIS}<|channel|>final"):
        made = tokens(after(text, logit_bias={free: 100.0}, max_tokens=len(text)))
        assert made[0] == free


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"reasoning_parser_kwargs": {"other": 1}}, "reasoning_parser_kwargs"),
        ({"reasoning_parser_kwargs": {"chat_template_kwargs": 1}}, "reasoning_parser_kwargs"),
        ({"reasoning_parser_kwargs": []}, "reasoning_parser_kwargs"),
        ({"reasoning_ended": "no"}, "reasoning_ended"),
    ],
)
def test_contract_C05_options_of_another_kind_are_refused_by_name(
    core: EngineCore, smollm2: str, prompt: list[int], options: dict[str, Any], field: str
) -> None:
    """By the front-end, and by a core that they reach all the same."""
    source = resolve_model(smollm2)
    inputs = InputProcessor(
        TextRenderer(source), max_model_len=512, vocab_size=49152, reasoning_parser="think"
    )
    with pytest.raises(InvalidRequestError, match=field) as refusal:
        inputs.process("r", prompt, SamplingParams(), **options)
    assert refusal.value.param == field
    if isinstance(options.get("reasoning_parser_kwargs"), dict):
        assert field in (alone(core, ask("r", prompt, **options))[-1].error or "")


def test_contract_C05_options_without_a_parser_are_refused(
    smollm2: str, tokenizer: Tokenizer
) -> None:
    """Rather than dropped; that reasoning has ended is true where there is none."""
    prompt = tokenizer.encode(ASSISTANT)
    inputs = InputProcessor(
        TextRenderer(resolve_model(smollm2)), max_model_len=512, vocab_size=49152
    )
    wrong: list[dict[str, Any]] = [{"reasoning_ended": False}, {"reasoning_parser_kwargs": {}}]
    for options in wrong:
        [field] = options
        with pytest.raises(InvalidRequestError, match="reasoning_parser") as refusal:
            inputs.process("r", prompt, SamplingParams(), **options)
        assert refusal.value.param == field
    assert inputs.process("r", prompt, SamplingParams(), reasoning_ended=True).reasoning_ended
    core = thinking_core(smollm2, "none")
    last = alone(core, ask("r", prompt, reasoning_ended=False))[-1]
    assert "reasoning_ended" in (last.error or "")
    assert said(tokenizer, alone(core, ask("r", prompt, reasoning_ended=True))) in CHOICE


# --- counting -------------------------------------------------------------------------------------


def test_contract_C05_tokens_of_reasoning_are_counted_one_by_one(
    core: EngineCore, tokenizer: Tokenizer, prompt: list[int], forced: dict[str, Any]
) -> None:
    """However many of them come in one output: here all."""
    made = tokens(alone(core, ask("r", prompt, **forced)))
    parser = ReasoningParser(
        FORMATS["think"], lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    )
    readers = parser.readers(prompt, {}, shown=True)
    text = tokenizer.decode(made)
    whole = CompletionOutput(0, text, made, None, None, "stop", None)
    reasoning, answer = readers.read(whole)
    assert (reasoning, answer in CHOICE) == ("wonder", True)
    assert readers.num_tokens == len(tokenizer.encode("<think> wonder</think>"))
