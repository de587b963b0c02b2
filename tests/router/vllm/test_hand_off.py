"""What a prefill engine of the runtime vllm is asked, and what its answer means."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_kit.fake_server import lent
from vllm_kit.sent import request

from diptych_protocol import FinishReason, StructuredOutputsParams
from diptych_protocol.config import Connector
from diptych_router.vllm.hand_off import (
    lending_leg,
    passes_token_on,
    prefill_answer,
    prefill_output,
)

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[4]]}


def test_a_prefill_engine_is_asked_to_lend_under_the_id_that_the_router_has_drawn() -> None:
    leg = lending_leg({"do_remote_decode": True, "lease_id": "ab" * 16, "remote_host": "evil"})
    assert leg.lends
    assert leg.params == {
        "do_remote_decode": True, "do_remote_prefill": False, "lease_id": "ab" * 16,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("connector", "params", "passes"),
    [
        ("diptych", {}, True),
        ("diptych", {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}, True),
        ("diptych", {"structured_outputs": StructuredOutputsParams(regex="a")}, False),
        ("diptych", {"presence_penalty": 0.5}, False),
        ("diptych", {"frequency_penalty": -0.5}, False),
        ("diptych", {"bad_words": ["no"]}, False),
        ("nixl", {}, False),
    ],
)
def test_the_token_of_prefill_is_kept_where_decode_can_go_on_after_it(
    connector: Connector, params: dict[str, Any], passes: bool
) -> None:
    asked = request(**params)
    assert passes_token_on(connector, asked) is passes
    output = prefill_output(asked, prefill_answer(lent(5, PARAMS)), 64, connector)
    assert output.new_token_ids == ([5] if passes else [])
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("connector", ["diptych", "nixl"])
def test_an_answer_that_ends_with_its_first_token_needs_no_decode_engine(
    connector: Connector,
) -> None:
    output = prefill_output(request(), prefill_answer(lent(5, None, "stop")), 64, connector)
    assert (output.new_token_ids, output.finish_reason) == ([5], FinishReason.STOP)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lent(5, None), "keeps no KV"),
        (lent(99, PARAMS), "one token"),
        (b'{"choices": [{"token_ids": [1, 2], "finish_reason": "length"}]}', "one token"),
        (b'{"choices": [{"token_ids": [], "finish_reason": "length"}]}', "one token"),
        (b'{"choices": [{"token_ids": [1]}]}', "not finished"),
        (b'{"choices": []}', "not finished"),
        (b'{"error": {"message": "boom", "code": 500}}', "boom"),
    ],
)
def test_an_answer_of_prefill_that_cannot_be_used_says_why(body: bytes, words: str) -> None:
    output = prefill_output(request(), prefill_answer(body), 64, "diptych")
    assert output.finish_reason is FinishReason.ERROR
    assert words in str(output.error)
