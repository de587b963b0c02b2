"""A request's way through the pools."""

from __future__ import annotations

from typing import Any

import pytest
from cases import each

from diptych_frontend.openai.api_types import CompletionRequest
from diptych_protocol import (
    UNSAID,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)
from diptych_protocol.wire import ErrorKind
from diptych_router.engines.known_prefixes import BlockNamer
from diptych_router.requests.records import record_of
from diptych_router.requests.request_record import Setback
from diptych_router.requests.routed_request import (
    MAX_ERRORS,
    MAX_LOSSES,
    RoutedRequest,
    Stage,
    wanted_way,
)

LEASE = {"lease_id": "ab", "do_remote_prefill": True}


def routed(prompt: int = 10, max_model_len: int = 100, **params: Any) -> RoutedRequest:
    request = EngineCoreRequest(
        "r", list(range(prompt)), None, SamplingParams(**{"max_tokens": 5, **params}),
        None, 2, 0.0, None, None, None,
    )  # fmt: skip
    return RoutedRequest(request, max_model_len, record_of(request, 0.0), BlockNamer())


@each(
    ("said", "way"),
    [
        ({"do_remote_decode": True}, "always"),
        ({"do_remote_decode": False}, "never"),
        ({"do_remote_decode": False, "do_remote_prefill": False}, "never"),
        ({"do_remote_decode": None}, None),
        ({"do_remote_prefill": False}, None),
        ({"lease_seconds": 5}, None),
        ({}, None),
        (None, None),
    ],
)
def test_only_a_client_that_speaks_of_remote_decoding_chooses_the_way_of_its_request(
    said: dict[str, Any] | None, way: str | None
) -> None:
    request = CompletionRequest(model="m", prompt="hi", kv_transfer_params=said)
    params = request.to_sampling_params(UNSAID, max_tokens=1, logprobs=None)
    assert wanted_way(params) == way
    assert wanted_way(SamplingParams(extra_args={"kv_transfer_params": said})) == way


def transfer_params(request: EngineCoreRequest) -> dict[str, Any]:
    return (request.sampling.extra_args or {}).get("kv_transfer_params") or {}


def test_prefill_is_the_same_request_that_stops_after_one_token_and_keeps_its_kv() -> None:
    state = routed(temperature=0.5, seed=3, min_tokens=4)
    request = state.prefill_request()
    assert transfer_params(request)["do_remote_decode"] is True
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (1, 1)
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 3)
    request.params.check()
    assert state.original.sampling.max_tokens == 5, "the user's own parameters are not touched"


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
    assert request.sampling.max_tokens == 5


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
    assert request.sampling.max_tokens == 4
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
    assert request.sampling.extra_args == {"x": 1}


def test_a_decode_engine_that_leaves_hands_its_stream_on() -> None:
    state = routed()
    state.place("decode d1", Stage.DECODE)
    assert state.absorb(EngineCoreOutput("r/1", [1, 2])) is False
    output = EngineCoreOutput(
        "r/1", [], finish_reason=FinishReason.ABORT, kv_transfer_params=dict(LEASE)
    )
    assert state.absorb(output) is True
    assert (output.finished, output.kv_transfer_params) == (False, None)
    state.place("decode d2", Stage.DECODE)
    request = state.decode_request()
    assert transfer_params(request) == LEASE
    assert request.generated_token_ids == [1, 2]
    state.absorb(EngineCoreOutput("r/2", [3]))
    assert state.lease is None, "it has been read"


def test_engines_know_each_placement_by_its_own_id_and_the_user_by_hers() -> None:
    state = routed()
    ids = []
    for engine in ("prefill p", "prefill p"):
        state.place(engine, Stage.PREFILL)
        ids.append(state.prefill_request().request_id)
    assert len({"r", *ids}) == 3
    output = EngineCoreOutput(ids[-1], [1])
    state.absorb(output)
    assert output.request_id == "r"


@pytest.mark.parametrize(
    ("setback", "attempts"),
    [
        (Setback.ERROR, MAX_ERRORS),
        (Setback.LOSS, MAX_LOSSES),
        (Setback.FULL, MAX_LOSSES),
        (Setback.MOVE, None),
    ],
)
def test_how_often_a_request_may_be_set_back(setback: Setback, attempts: int | None) -> None:
    state = routed()
    allowed = [state.set_back(setback) for _ in range(50)]
    assert allowed.count(True) == (50 if attempts is None else attempts - 1)
    assert allowed == sorted(allowed, reverse=True)


def test_an_error_during_a_hand_off_is_blamed_on_the_engines() -> None:
    state = routed()
    assert state.setback_of(ErrorKind.FAULT) is Setback.ERROR
    state.absorb(EngineCoreOutput("r", [1], finish_reason=FinishReason.LENGTH,
                                  kv_transfer_params=dict(LEASE)))  # fmt: skip
    state.place("decode d", Stage.DECODE)
    assert state.setback_of(ErrorKind.FAULT) is Setback.LOSS
    state.absorb(EngineCoreOutput("r", [2]))
    assert state.setback_of(ErrorKind.FAULT) is Setback.ERROR


@pytest.mark.parametrize("stage", Stage)
def test_an_engine_without_room_is_not_asked_again_before_the_request_got_on(stage: Stage) -> None:
    state = routed()
    for engine in ("a", "b"):
        state.place(engine, stage)
        assert state.set_back(state.setback_of(ErrorKind.OVERLOADED))
    assert (state.full, state.errors) == ({"a", "b"}, 0)
    state.place("c", stage)
    state.absorb(EngineCoreOutput("r/3", [1]))
    assert state.full == set()


def test_only_what_an_engine_computes_renews_the_time_to_wait() -> None:
    state = routed()
    state.hold_until = 7.0
    state.place("prefill p", Stage.PREFILL)
    state.set_back(Setback.LOSS)
    assert state.hold_until == 7.0
    state.absorb(EngineCoreOutput("r/1", [1]))
    assert state.hold_until is None
