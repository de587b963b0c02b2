"""What vLLM's connector is told of a hand-off, and what a router is told of it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_kit.sent import request

from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_protocol import (
    EngineCoreOutput,
    FinishReason,
    InvalidRequestError,
    LogprobsLists,
    SamplingParams,
    StructuredOutputsParams,
)
from diptych_vllm.serve.hand_off import (
    FETCHES,
    LENDS,
    MARGIN,
    TooLateError,
    VllmHandOffs,
    asked_of,
    passes_token_on,
)
from diptych_vllm.serve.translation import OURS

NIXL = "NixlConnector"
LEASE_S = 30.0


class Clock:
    """Seconds since 1970, as a test wants them."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def of_nixl() -> tuple[VllmHandOffs, Clock]:
    clock = Clock()
    return VllmHandOffs(NIXL, "c", LEASE_S, None, clock, lambda bits: 7), clock


def lent(hand_offs: VllmHandOffs) -> tuple[EngineCoreOutput, dict[str, Any]]:
    """What a router is told by a prefill engine: the output, and the reference in it."""
    asked = request(extra_args={"kv_transfer_params": {LENDS: True}})
    told: dict[str, Any] = {FETCHES: True, "remote_block_ids": [[1]]}
    output = EngineCoreOutput(
        "r",
        [5],
        LogprobsLists([[5]], [[0.0]], [1]),
        finish_reason=FinishReason.LENGTH,
        kv_transfer_params=told,
    )
    hand_offs.answer(asked, output)
    assert output.kv_transfer_params is not None
    return output, output.kv_transfer_params


def test_decode_generates_the_token_that_it_must_not_be_told() -> None:
    output, reference = lent(of_nixl()[0])
    assert (output.new_token_ids, output.new_logprobs) == ([], None)
    assert (reference["lease_id"], reference["compat"]) == (f"{7:032x}", "c")


def test_our_connector_goes_on_after_the_token() -> None:
    hand_offs = VllmHandOffs(OURS, "c", LEASE_S, References(PUBLIC_KEY))
    output, reference = lent(hand_offs)
    assert output.new_token_ids == [5]
    assert "take_before" not in reference


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(json_object=True)},
    ],
)
def test_an_answer_that_depends_on_its_own_tokens_is_generated_by_one_engine(
    fields: dict[str, Any],
) -> None:
    assert passes_token_on(SamplingParams(), OURS)
    assert not passes_token_on(SamplingParams(**fields), OURS)


def test_a_whole_answer_tells_nothing_of_kv() -> None:
    hand_offs, _ = of_nixl()
    output = EngineCoreOutput("r", [5], finish_reason=FinishReason.LENGTH, kv_transfer_params={})
    hand_offs.answer(request(), output)
    assert (output.new_token_ids, output.kv_transfer_params) == ([5], None)


def test_a_reference_is_read_once_and_as_vllm_made_it() -> None:
    hand_offs, _ = of_nixl()
    _, reference = lent(hand_offs)
    assert hand_offs.told(reference) == {FETCHES: True, "remote_block_ids": [[1]]}
    with pytest.raises(TooLateError, match="used before"):
        hand_offs.told(reference)
    assert hand_offs.given_back(reference) is None, "it may be read"


def test_a_refused_request_leaves_its_reference_to_be_given_back() -> None:
    hand_offs, _ = of_nixl()
    _, reference = lent(hand_offs)
    hand_offs.told(reference)
    hand_offs.unread(reference)
    assert hand_offs.given_back(reference) == {FETCHES: True, "remote_block_ids": [[1]]}
    assert hand_offs.given_back(reference) is None
    with pytest.raises(TooLateError):
        hand_offs.told(reference)


def test_a_third_of_the_lease_must_be_left() -> None:
    hand_offs, clock = of_nixl()
    _, reference = lent(hand_offs)
    clock.now += LEASE_S * (1 - MARGIN) + 1
    with pytest.raises(TooLateError, match="too old"):
        hand_offs.told(reference)
    assert hand_offs.given_back(reference) is not None
    clock.now += LEASE_S
    assert hand_offs.given_back(reference) is None


@pytest.mark.parametrize("until", [None, "soon", True])
def test_a_reference_without_its_time_is_not_read(until: Any) -> None:
    hand_offs, _ = of_nixl()
    with pytest.raises(TooLateError):
        hand_offs.told({FETCHES: True, "lease_id": "a", "take_before": until})


def test_what_nobody_has_signed_is_not_given_back() -> None:
    hand_offs = VllmHandOffs(OURS, "c", LEASE_S, References(PUBLIC_KEY))
    with pytest.raises(InvalidRequestError):
        hand_offs.given_back({"lease_id": "a" * 32})


def test_prefill_is_told_the_name_that_the_router_has_drawn() -> None:
    hand_offs, _ = of_nixl()
    asked = {LENDS: True, "lease_id": "a", "remote_host": None, "tp_size": 1}
    assert hand_offs.told(asked) == {LENDS: True, FETCHES: False, "lease_id": "a"}


def test_parameters_that_are_none_ask_for_nothing() -> None:
    assert asked_of(request(extra_args={"kv_transfer_params": 5})) == {}
    assert asked_of(request()) == {}
