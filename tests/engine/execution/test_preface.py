"""Where an output stands before and in its form: a function of its tokens, whatever they are."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from engine_kit.toy_engine import make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from diptych_engine.execution.grammar_compiler import HopelessFormError
from diptych_engine.execution.grammar_state import STEP_S, GrammarError, GrammarState
from diptych_engine.scheduling.reasoning import ReasoningTokens
from diptych_engine.scheduling.request import Request
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.reasoning.formats import FORMATS
from diptych_frontend.text.structured_outputs import grammar_of, parser_limits
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import StructuredOutputsParams

VOCABULARY, EOS = 49152, 2
ANSWERS = ["yes", "<b>", "<think>"]
PIECES = [
    "<", "</", "think", ">", "><", " wonder", "yes", "b", "|", "channel", "message", "final",
    "analysis", "end", "<|im_end|>",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    tokenizer = load_tokenizer(resolve_model(smollm2))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def grammar(tokenizer: Tokenizer) -> LLMatcher:
    tokens = LLTokenizer(tokenizer.backend.to_str(), n_vocab=VOCABULARY, eos_token=[EOS])
    choices = " | ".join(f'"{answer}"' for answer in ANSWERS)
    return LLMatcher(tokens, LLMatcher.grammar_from_lark(f"start: {choices}"), log_level=0)


def output_of(token_ids: list[int]) -> Request:
    """A request with a prompt of one token and this output."""
    request = make_request("r", [1], 100)
    request.token_ids = [1, *token_ids]
    return request


def allowed(state: GrammarState, token_ids: list[int]) -> set[int] | str:
    """The tokens that may come next, or that the output breaks its grammar."""
    try:
        bits = state.allowed(output_of(token_ids))
    except GrammarError:
        return "broken"
    return set(np.flatnonzero(np.unpackbits(bits, count=VOCABULARY, bitorder="little")).tolist())


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=24), said=st.sampled_from([None, False]))
@settings(max_examples=40)
def test_contract_C05_an_output_read_at_once_stands_where_one_read_by_steps_does(
    tokenizer: Tokenizer, grammar: LLMatcher, name: str, pieces: list[str], said: bool | None
) -> None:
    reasoning = ReasoningTokens.of(FORMATS[name], tokenizer, VOCABULARY, [EOS]).before(said, [1])
    ids = [tokenizer.encode(piece)[0] for piece in pieces]
    by_steps = GrammarState(grammar, reasoning)
    for end in range(len(ids) + 1):
        expected = allowed(GrammarState(grammar, reasoning), ids[:end])
        assert allowed(by_steps, ids[:end]) == expected
        if expected == "broken":
            return


def test_contract_C05_the_first_tokens_may_be_the_marker_or_the_answer(
    tokenizer: Tokenizer, grammar: LLMatcher
) -> None:
    reasoning = ReasoningTokens.of(FORMATS["think"], tokenizer, VOCABULARY, [EOS]).before(None, [1])

    def after(*pieces: str) -> Any:
        ids = [tokenizer.encode(piece)[0] for piece in pieces]
        found = allowed(GrammarState(grammar, reasoning), ids)
        return found if isinstance(found, str) else {tokenizer.token_text(token) for token in found}

    assert {"<", "yes", "y"} <= after()
    assert " wonder" not in after()
    assert {"think", "b"} <= after("<")
    assert " wonder" not in after("<")
    free = after("<", "think", ">")
    assert {" wonder", "<", "yes"} <= free
    assert tokenizer.token_text(EOS) not in free
    assert after("<", "think", ">", "</", "think", ">") == after() | {"<"}
    assert after("yes") == {tokenizer.token_text(EOS)}
    assert after(" wonder") == "broken"


LITERAL = "so say we all, and more " * 20
FORCED: list[dict[str, Any]] = [
    {"choice": [LITERAL]},
    {"json": {"enum": [f"a {LITERAL}", f"an {LITERAL}"]}},
    {"json": {"const": {"names": [LITERAL, 1234567, LITERAL]}}},
    {"regex": "[a-c]{2}(dog ){200}[0-9]?"},
    {"grammar": f'start: "x" word " " word\nword: "{LITERAL}"'},
]


class CountedMasks:
    """A grammar, of which one output is read, with the number of its masks."""

    def __init__(self, grammar: LLMatcher) -> None:
        self._grammar = grammar.deep_copy()
        self.masks = 0

    def deep_copy(self) -> CountedMasks:
        return self

    def compute_bitmask(self) -> bytes:
        self.masks += 1
        return self._grammar.compute_bitmask()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)


@pytest.mark.parametrize("form", FORCED, ids=lambda form: next(iter(form)))
def test_text_that_must_follow_is_tokenized_once(
    tokenizer: Tokenizer, form: dict[str, Any]
) -> None:
    """And each mask is as if the grammar were asked every time."""
    tokens = LLTokenizer(tokenizer.backend.to_str(), n_vocab=VOCABULARY, eos_token=[EOS])
    grammar = LLMatcher(
        tokens, grammar_of(StructuredOutputsParams(**form)), log_level=0, limits=parser_limits()
    )
    each_time, random = grammar.deep_copy(), Random(1)
    counted: Any = CountedMasks(grammar)
    state, ids = GrammarState(counted), list[int]()
    while not each_time.is_stopped():
        bits = state.allowed(output_of(ids))
        expected = np.frombuffer(each_time.compute_bitmask(), np.uint8)
        assert (bits == expected).all(), tokenizer.decode(ids)
        ids.append(random.choice(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()))
        assert each_time.consume_token(ids[-1])
    assert 2 * counted.masks < len(ids)


@pytest.mark.parametrize("step_s", [STEP_S, 10 * STEP_S])
def test_a_form_that_takes_too_long_for_too_many_tokens_ends_its_answer(
    grammar: LLMatcher, step_s: float
) -> None:
    """A grammar of 30 bytes may take half a second a token, in which all streams wait."""
    times = (step_s * (read // 2 + read % 2) for read in count())
    state = GrammarState(grammar, clock=lambda: next(times))
    slow = step_s > STEP_S
    with pytest.raises(HopelessFormError, match="too many ways") if slow else nullcontext():
        steps_of(state, 100)


def steps_of(state: GrammarState, number: int) -> None:
    for _ in range(number):
        state.allowed(output_of([]))
