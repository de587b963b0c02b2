"""What a request may ask of the sampler holds in the engine core, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from engine_kit.block_checks import check_blocks
from engine_kit.core import (
    CLIENT,
    VOCABULARY,
    core_request,
    generate,
    guess_always,
    make_core,
    run,
    step,
    tokens,
)
from engine_kit.pooling import runner_of

from diptych_engine.control.core import EngineCore
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineCoreOutput,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    SpeculativeConfig,
)

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return make_core()


# --- logit_bias -----------------------------------------------------------------------------------


def test_contract_C05_a_bias_makes_and_breaks_tokens(core: EngineCore) -> None:
    plain = generate(core, PROMPT, max_tokens=4)
    assert generate(core, PROMPT, max_tokens=4, logit_bias={17: 100.0}) == [17] * 4
    without = generate(core, PROMPT, max_tokens=4, logit_bias={plain[0]: -100.0})
    assert plain[0] not in without


def test_contract_C05_a_bias_shifts_the_odds_of_random_tokens(core: EngineCore) -> None:
    requests = [
        core_request(
            f"{seed}", PROMPT, temperature=1.0, seed=seed, max_tokens=8, logit_bias={3: 6.0, 4: 6.0}
        )
        for seed in range(8)
    ]
    made = [
        t for outputs in run(core, *requests).values() for o in outputs for t in o.new_token_ids
    ]
    favoured = sum(token in (3, 4) for token in made)
    assert len(made) * 0.8 < favoured < len(made)
    assert {3, 4} < set(made)


def test_contract_C05_a_bias_touches_no_other_row(core: EngineCore) -> None:
    alone = generate(core, PROMPT, max_tokens=6)
    both = run(
        core,
        core_request("plain", PROMPT, max_tokens=6),
        core_request("biased", PROMPT, max_tokens=6, logit_bias={17: 100.0}),
    )
    assert [t for o in both["plain"] for t in o.new_token_ids] == alone


def test_contract_M04_an_output_tells_how_many_logits_are_no_numbers() -> None:
    core = make_core()
    core.add(core_request("broken", PROMPT, max_tokens=4), CLIENT)
    assert [output.num_nans_in_logits for output in step(core)] == [0]
    blocks = core.scheduler.requests["broken"].block_ids
    runner_of(core).kv_cache[blocks] = float("nan")
    [output] = step(core)
    assert output.num_nans_in_logits == VOCABULARY
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.ERROR, [])
    assert "NaN" in (output.error or "")


def test_what_is_computed_of_no_numbers_is_no_answer_and_spares_others() -> None:
    core = make_core(speculative_config=SpeculativeConfig(num_speculative_tokens=2))
    guess_always(core)
    repeated = PROMPT * 4
    plain = generate(core, repeated, max_tokens=20)
    core.add(core_request("broken", repeated, max_tokens=40), CLIENT)
    core.add(core_request("whole", [*reversed(PROMPT)], max_tokens=8), CLIENT)
    made: dict[str, list[EngineCoreOutput]] = {"broken": [], "whole": []}
    while core.has_work:
        for output in step(core):
            made[output.request_id].append(output)
        if len(made["broken"]) == 1:
            broken = core.scheduler.requests["broken"].block_ids
            runner_of(core).kv_cache[broken] = float("nan")
    assert made["broken"][-1].finish_reason is FinishReason.ERROR
    assert "NaN" in (made["broken"][-1].error or "")
    assert tokens(made["broken"]) == plain[: len(tokens(made["broken"]))]
    assert made["whole"][-1].finish_reason is FinishReason.LENGTH


def test_what_is_no_number_is_not_found_by_the_next_request() -> None:
    """The request's own blocks, and those that it has found, which a session has pinned."""
    core = make_core()
    prompt, block = PROMPT * 8, core.scheduler.prefixes.block_size
    plain = generate(core, prompt, max_tokens=4)
    again = core_request("broken", prompt, max_tokens=100)
    core.add(again, CLIENT)
    step(core)
    request = core.scheduler.requests["broken"]
    assert (request.num_cached_tokens or 0) >= block
    core.scheduler.pool.pin(core.scheduler.prefixes.lookup_hashes(request), "somebody", 60.0)
    assert core.scheduler.pool.num_pinned
    runner_of(core).kv_cache[request.block_ids] = float("nan")
    [output] = step(core)
    assert output.finish_reason is FinishReason.ERROR
    check_blocks(core.scheduler.pool)
    assert not core.scheduler.pool.num_pinned
    [outputs] = run(core, core_request("next", prompt, max_tokens=4)).values()
    assert (tokens(outputs), outputs[0].num_cached_tokens) == (plain, 0)


# --- bad words ------------------------------------------------------------------------------------


def test_contract_C05_a_bad_word_ends_before_its_last_token(core: EngineCore) -> None:
    """The greedy answer's own pieces are forbidden one after the other."""
    plain = generate(core, PROMPT, max_tokens=6)
    for length in (1, 2, 3):
        made = generate(core, PROMPT, max_tokens=6, bad_words_token_ids=[plain[:length]])
        assert made[: length - 1] == plain[: length - 1]
        assert made[length - 1] != plain[length - 1]
        pieces = [made[i : i + length] for i in range(len(made))]
        assert plain[:length] not in pieces


def test_contract_C05_a_bad_word_is_not_begun_by_the_prompt(core: EngineCore) -> None:
    plain = generate(core, PROMPT, max_tokens=2)
    straddling = [PROMPT[-1], plain[0]]
    assert generate(core, PROMPT, max_tokens=2, bad_words_token_ids=[straddling]) == plain


def test_contract_C05_bad_words_are_tokenised_with_and_without_a_space(smollm2: str) -> None:
    source = resolve_model(smollm2)
    renderer = TextRenderer(source)
    inputs = InputProcessor(renderer, max_model_len=100, vocab_size=source.config.vocab_size)
    request = inputs.process("r", [1], SamplingParams(bad_words=[" bad apple"]))
    sequences = request.sampling.bad_words_token_ids
    assert sequences is not None
    assert [renderer.decode(sequence) for sequence in sequences] == ["bad apple", " bad apple"]


# --- min_tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_contract_C05_min_tokens_keeps_every_end_out(core: EngineCore, min_tokens: int) -> None:
    """EOS and a stop token that would come at once come after `min_tokens` others."""
    for ends in ({"eos_token_id": 17}, {"stop_token_ids": [17]}):
        [outputs] = run(
            core,
            core_request(
                "r", PROMPT, max_tokens=9, min_tokens=min_tokens, logit_bias={17: 100.0}, **ends
            ),
        ).values()
        made = [token for output in outputs for token in output.new_token_ids]
        assert made.index(17) == min_tokens
        assert outputs[-1].finish_reason is FinishReason.STOP


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("bad_words_token_ids", [[1], [VOCABULARY]]),
        ("bad_words_token_ids", [[]]),
        ("bad_words_token_ids", [[1]] * 100),
        ("stop_token_ids", [-1]),
    ],
)
def test_contract_C05_tokens_that_do_not_exist_are_refused_by_name(
    core: EngineCore, field: str, value: Any
) -> None:
    """By the front-end, and by a core that such a message reaches all the same."""
    source = resolve_model(f"dummy://?vocab_size={VOCABULARY}")
    inputs = InputProcessor(TextRenderer(source), max_model_len=100, vocab_size=VOCABULARY)
    with pytest.raises(InvalidRequestError, match=field) as refusal:
        inputs.process("r", [1], SamplingParams(**{field: value}))
    assert refusal.value.param == field
    [outputs] = run(core, core_request("r", PROMPT, **{field: value})).values()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert field in (outputs[-1].error or "")
