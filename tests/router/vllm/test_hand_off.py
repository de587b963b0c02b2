"""What a prefill engine of the runtime vllm is asked, and what its answer means."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_kit.fake_server import lent
from vllm_kit.sent import request

from diptych_protocol import FinishReason, StructuredOutputsParams
from diptych_protocol.config import Connector
from diptych_router.engines.vllm.hand_off import (
    announcing_of,
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
    output = prefill_output(asked, prefill_answer(lent(5, PARAMS)), 64, passes_on=passes)
    assert output.new_token_ids == ([5] if passes else [])
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("passes", [True, False])
def test_an_answer_that_ends_with_its_first_token_needs_no_decode_engine(passes: bool) -> None:
    answer = prefill_answer(lent(5, None, "stop"))
    output = prefill_output(request(), answer, 64, passes_on=passes)
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
    output = prefill_output(request(), prefill_answer(body), 64, passes_on=True)
    assert output.finish_reason is FinishReason.ERROR
    assert words in str(output.error)


REFERENCE = {
    "do_remote_prefill": True, "remote_engine_id": "p1", "remote_host": "10.0.0.1",
    "remote_port": 5558, "epoch": "e", "compat": "c", "lease_id": "a" * 32, "expires_at": 9,
    "remote_num_tokens": 3, "remote_block_ids": [[4]], "tokens_digest": "d", "proof": "of it",
    "remote_request_id": "r", "first_token_ids": [], "tp_size": 2, "lease_seconds": 20.0,
    "announcing": {"proof": "of the engine", "min_tokens": 513}, "of others": 1,
}  # fmt: skip


def test_a_reference_says_how_the_next_one_of_its_engine_is_announced() -> None:
    announcing = announcing_of(REFERENCE)
    assert announcing is not None
    assert announcing.min_tokens == 513
    told = {name: x for name, x in announcing.engine.to_dict().items() if x not in (None, False)}
    assert told == {
        "do_remote_prefill": True, "remote_engine_id": "p1", "remote_host": "10.0.0.1",
        "remote_port": 5558, "epoch": "e", "compat": "c", "proof": "of the engine", "tp_size": 2,
        "lease_seconds": 20.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"announcing": None},
        {"announcing": "yes"},
        {"announcing": {"proof": "p"}},
        {"announcing": {"proof": "p", "min_tokens": 0}},
        {"announcing": {"proof": "p" * 300, "min_tokens": 1}},
        {"remote_host": "a name"},
        {"remote_port": 0},
    ],
)
def test_what_cannot_be_read_is_not_announced(changes: dict[str, Any]) -> None:
    assert announcing_of(REFERENCE | changes) is None
