"""What vLLM is asked for a request of the wire, and what it generates in the wire's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vllm_kit.sent import request

from diptych_protocol import (
    FinishReason,
    InvalidRequestError,
    LoRARequest,
    StructuredOutputsParams,
)
from diptych_protocol.arrays import Array
from diptych_protocol.outputs import LEAST_LOGPROB
from diptych_protocol.wire import Abilities, ErrorKind
from diptych_vllm.serve.translation import (
    check_request,
    form_of,
    num_received,
    output_of,
    sampling_of,
    token_ids_of,
)

ABLE = Abilities(images=False, adapters=False, prompt_embeds=False, logits_processors=False)


def test_tokens_of_other_engines_count_as_answered() -> None:
    asked = request(7, 9, prompt=4, max_tokens=10, min_tokens=5, seed=40)
    assert token_ids_of(asked) == [0, 1, 2, 3, 7, 9]
    fields = sampling_of(asked, 100)
    assert (fields["max_tokens"], fields["min_tokens"], fields["seed"]) == (8, 3, 42)


def test_the_largest_seed_stays_one() -> None:
    assert sampling_of(request(7, seed=(1 << 63) - 1), 100)["seed"] == 0


@pytest.mark.parametrize(("wanted", "expected"), [(None, 92), (500, 92), (50, 50)])
def test_an_answer_ends_with_the_context(wanted: int | None, expected: int) -> None:
    assert sampling_of(request(prompt=8, max_tokens=wanted), 100)["max_tokens"] == expected


def test_a_full_context_is_left_to_vllm_to_refuse() -> None:
    assert sampling_of(request(prompt=100, max_tokens=5), 100)["max_tokens"] == 1


def test_log_probabilities_of_a_prompt_are_told_once() -> None:
    assert sampling_of(request(prompt_logprobs=2), 100)["prompt_logprobs"] == 2
    assert sampling_of(request(7, prompt_logprobs=2), 100)["prompt_logprobs"] is None


def test_a_form_is_sent_without_what_only_our_cores_know() -> None:
    params = request(
        structured_outputs=StructuredOutputsParams(choice=["a"], lenient=True)
    ).sampling
    assert form_of(params) == {"choice": ["a"]}
    assert form_of(request().sampling) is None


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("resumable", {"resumable": True}),
        ("prompt_embeds", {"prompt_embeds": Array("float32", (1, 1), bytes(4))}),
        ("model", {"lora_request": LoRARequest("x", 1, "/x")}),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(field: str, asked: dict[str, Any]) -> None:
    sent = request()
    for name, value in asked.items():
        setattr(sent, name, value)
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as refused:
        check_request(sent, ABLE)
    assert refused.value.param == field


def test_a_form_that_another_engine_has_begun_is_refused() -> None:
    form = StructuredOutputsParams(choice=["a"])
    check_request(request(structured_outputs=form), ABLE)
    with pytest.raises(InvalidRequestError, match="begins each form anew"):
        check_request(request(7, structured_outputs=form), ABLE)


@dataclass
class Prompt:
    """vLLM's `PrefillStats`."""

    num_cached_tokens: int
    num_external_cached_tokens: int


@dataclass
class Rows:
    """vLLM's `LogprobsLists` and, for a prompt, `LogprobsTensors`."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    selected_token_ranks: np.ndarray


@dataclass
class Made:
    """vLLM's `EngineCoreOutput`."""

    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    new_logprobs: Rows | None = None
    new_prompt_logprobs_tensors: Rows | None = None
    prefill_stats: Prompt | None = None


def rows(names: list[list[int]], values: list[list[float]], ranks: list[int]) -> Rows:
    ranked = np.array(ranks)
    return Rows(np.array(names), np.array(values, np.float32), ranked, ranked)


def test_the_first_output_says_where_the_prompt_was() -> None:
    made = Made([5], prefill_stats=Prompt(40, 32))
    assert (output_of(request(), made).num_cached_tokens, num_received(made)) == (40, 32)
    assert (output_of(request(), Made([5])).num_cached_tokens, num_received(Made([5]))) == (0, 0)


def test_log_probabilities_are_as_many_as_were_asked_for() -> None:
    """Another request of the step has asked for three."""
    made = Made([8], None, new_logprobs=rows([[8, 8, 9, 4]], [[-0.5, -0.5, -np.inf, -9]], [1]))
    told = output_of(request(logprobs=2), made).new_logprobs
    assert told is not None
    assert told.logprob_token_ids == [[8, 8, 9]]
    assert told.logprobs == [[-0.5, -0.5, LEAST_LOGPROB]]
    assert told.sampled_token_ranks == [1]
    assert output_of(request(), made).new_logprobs is None


def test_a_prompt_has_a_row_for_each_token_but_its_first() -> None:
    made = Made([1])
    made.new_prompt_logprobs_tensors = rows([[4, 6], [6, 6]], [[-1.0, -np.inf], [0, 0]], [3, 1])
    told = output_of(request(prompt_logprobs=1), made).new_prompt_logprobs_tensors
    assert told is not None
    assert told.logprob_token_ids.tolist() == [[4, 6], [6, 6]]
    assert told.logprobs.tolist() == [[-1.0, LEAST_LOGPROB], [0, 0]]
    assert told.selected_token_ranks.tolist() == [3, 1]


@pytest.mark.parametrize("reason", list(FinishReason)[:3])
def test_an_answer_ends_for_vllm_s_reason(reason: FinishReason) -> None:
    output = output_of(request(), Made([1], str(reason), 17))
    assert (output.finish_reason, output.stop_reason) == (reason, 17)


def test_an_end_for_another_reason_is_an_error() -> None:
    output = output_of(request(), Made([1], "error"))
    assert (output.finish_reason, output.error_kind) == (FinishReason.ERROR, ErrorKind.FAULT)
