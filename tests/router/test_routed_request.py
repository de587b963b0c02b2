"""A request's way through the pools."""

from __future__ import annotations

from typing import Any

import pytest

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)
from diptych_router.routed_request import RoutedRequest, Stage

LEASE = {"lease_id": "ab", "do_remote_prefill": True}


def routed(prompt: int = 10, max_model_len: int = 100, **params: Any) -> RoutedRequest:
    request = EngineCoreRequest(
        "r", list(range(prompt)), None, SamplingParams(**{"max_tokens": 5, **params}),
        None, 2, 0.0, None, None, None,
    )  # fmt: skip
    return RoutedRequest(request, max_model_len)


def transfer_params(request: EngineCoreRequest) -> dict[str, Any]:
    return (request.params.extra_args or {}).get("kv_transfer_params") or {}


def test_prefill_is_the_same_request_that_stops_after_one_token_and_keeps_its_kv() -> None:
    state = routed(temperature=0.5, seed=3, min_tokens=4)
    request = state.prefill_request()
    assert transfer_params(request)["do_remote_decode"] is True
    assert (request.params.max_tokens, request.params.min_tokens) == (1, 1)
    assert (request.params.temperature, request.params.seed) == (0.5, 3)
    request.params.check()
    assert state.original.params.max_tokens == 5, "the user's own parameters are not touched"


def test_the_token_that_ends_prefill_looks_unfinished_to_the_user() -> None:
    state = routed()
    output = EngineCoreOutput(
        "r", [42], finish_reason=FinishReason.LENGTH, kv_transfer_params=dict(LEASE)
    )
    assert state.absorb(output) is True
    assert (output.new_token_ids, output.finished, output.kv_transfer_params) == ([42], False, None)
    request = state.decode_request()
    assert transfer_params(request) == LEASE
    assert request.generated_token_ids == [42]
    assert request.params.max_tokens == 5


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR])
def test_what_really_ends_in_prefill_ends(reason: FinishReason) -> None:
    output = EngineCoreOutput("r", [42], finish_reason=reason)
    assert routed().absorb(output) is False
    assert output.finish_reason is reason


@pytest.mark.parametrize(
    "state", [routed(max_tokens=1), routed(prompt=99), routed(prompt=99, max_tokens=None)]
)
def test_a_single_token_is_not_worth_a_hand_off(state: RoutedRequest) -> None:
    request = state.prefill_request()
    assert transfer_params(request) == {}
    output = EngineCoreOutput("r", [42], finish_reason=FinishReason.LENGTH)
    assert state.absorb(output) is False
    assert output.finished


def test_a_second_attempt_continues_after_the_tokens_the_user_has() -> None:
    state = routed()
    state.absorb(EngineCoreOutput("r", [1], finish_reason=FinishReason.LENGTH))
    state.stage = Stage.DECODE
    state.absorb(EngineCoreOutput("r", [2, 3]))
    request = state.prefill_request()
    assert request.generated_token_ids == [1, 2, 3]
    assert request.params.max_tokens == 4
    assert state.tokens_left == 2


def test_a_decode_engine_s_length_is_the_end() -> None:
    state = routed()
    state.stage = Stage.DECODE
    output = EngineCoreOutput("r", [9], finish_reason=FinishReason.LENGTH)
    assert state.absorb(output) is False
    assert output.finished


def test_a_user_s_own_kv_transfer_params_do_not_reach_the_pools() -> None:
    state = routed(extra_args={"kv_transfer_params": {"do_remote_prefill": True}, "x": 1})
    request = state.aggregated_request()
    assert request.params.extra_args == {"x": 1}
