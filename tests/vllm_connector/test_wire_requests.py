"""What vLLM is asked for a request of the wire, and what it generates in the wire's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
class Logprob:
    """vLLM's class of this name."""

    logprob: float
    rank: int | None


@dataclass
class Generated:
    """vLLM's `CompletionOutput`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class News:
    """vLLM's `RequestOutput`."""

    outputs: list[Generated]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


def test_the_sampled_token_comes_before_the_likeliest() -> None:
    row = {5: Logprob(-3.0, 7), 8: Logprob(-0.1, 1), 9: Logprob(-0.2, 2)}
    output = output_of("r", News([Generated([5], [row])]), logprobs=2)
    told = output.new_logprobs
    assert told is not None
    assert told.logprob_token_ids == [[5, 8, 9]]
    assert told.logprobs == [[-3.0, -0.1, -0.2]]
    assert told.sampled_token_ranks == [7]


def test_a_likely_token_is_there_twice() -> None:
    row = {8: Logprob(-0.1, 1), 9: Logprob(float("-inf"), 2)}
    told = output_of("r", News([Generated([8], [row])]), logprobs=2).new_logprobs
    assert told is not None
    assert told.logprob_token_ids == [[8, 8, 9]]
    assert told.logprobs == [[-0.1, -0.1, LEAST_LOGPROB]]


def test_the_rows_of_a_prompt_begin_with_its_second_token() -> None:
    rows = [None, {4: Logprob(-1.0, 3), 6: Logprob(-0.5, 1)}, {6: Logprob(-0.25, 1)}]
    news = News([Generated([1])], prompt_logprobs=rows, prompt_token_ids=[2, 4, 6])
    told = output_of("r", news, prompt_logprobs=1).new_prompt_logprobs_tensors
    assert told is not None
    assert told.logprob_token_ids.tolist() == [[4, 6], [6, 6]]
    assert told.logprobs.tolist() == [[-1.0, -0.5], [-0.25, -0.25]]
    assert told.selected_token_ranks.tolist() == [3, 1]


@pytest.mark.parametrize("reason", list(FinishReason)[:3])
def test_an_answer_ends_for_vllm_s_reason(reason: FinishReason) -> None:
    output = output_of("r", News([Generated([1], None, str(reason), 17)]))
    assert (output.finish_reason, output.stop_reason) == (reason, 17)


def test_an_end_for_another_reason_is_an_error() -> None:
    output = output_of("r", News([Generated([1], None, "error")]))
    assert (output.finish_reason, output.error_kind) == (FinishReason.ERROR, ErrorKind.FAULT)
