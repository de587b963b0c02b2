"""Messages that no front-end of ours sends: each fails alone, with a reason; the core goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from cases import each
from engine_kit.core import CLIENT, VOCABULARY, core_request, generate, make_core, run, step, tokens

from diptych_engine.control.core import EngineCore
from diptych_protocol import (
    UNREADABLE,
    Array,
    DiptychError,
    EngineCoreRequest,
    FinishReason,
    KVTransferConfig,
    LoRARequest,
    PoolingParams,
    StructuredOutputsParams,
    UtilityCall,
    wire,
)

HIDDEN = 32
PROMPT = [1, 2, 3]
MAX_LENGTH = 64
BEYOND = 2**63
"""No C integer holds it, but msgpack and Python do."""


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    core = make_core(
        max_loras=1,
        max_model_len=MAX_LENGTH,
        kv_transfer=KVTransferConfig(),
        scheduling_policy="priority",
    )
    yield core
    core.close()


@pytest.fixture(scope="module")
def usual(core: EngineCore) -> list[int]:
    return generate(core, PROMPT, max_tokens=4)


def as_received(message: EngineCoreRequest) -> EngineCoreRequest:
    return wire.request_decoder.decode(wire.encoder.encode(message))


def pooling(**fields: Any) -> EngineCoreRequest:
    message = core_request("bad", PROMPT)
    return msgspec.structs.replace(
        message, sampling_params=None, pooling_params=PoolingParams(**fields)
    )


def lora(name: str, number: int, path: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, number, path)}


def hand_off(**changes: Any) -> dict[str, Any]:
    """P's answer as D gets it, with changes."""
    lent = {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[0]],
        "remote_host": "127.0.0.1", "remote_port": 1, "remote_num_tokens": 2,
        "lease_id": "00", "epoch": "e", "compat": "c", "expires_at": 1, "proof": "00",
    }  # fmt: skip
    return {"extra_args": {"kv_transfer_params": {**lent, **changes}}}


REFUSED: dict[str, dict[str, Any]] = {
    "bias beyond the vocabulary": {"logit_bias": {VOCABULARY: 1.0}},
    "bias of no number": {"logit_bias": {1: float("nan")}},
    "bad word of nothing": {"bad_words_token_ids": [[]]},
    "bad word beyond the vocabulary": {"bad_words_token_ids": [[1, VOCABULARY]]},
    "bad word beyond C": {"bad_words_token_ids": [[BEYOND]]},
    "stop beyond the vocabulary": {"stop_token_ids": [-1]},
    "output beyond the vocabulary": {"generated_token_ids": [-1]},
    "seed beyond C": {"seed": BEYOND},
    "time without an order": {"arrival_time": float("nan")},
    "session without an order": {"resumable": True, "arrival_time": float("inf")},
    "session with a form": {
        "resumable": True,
        "structured_outputs": StructuredOutputsParams(json_object=True),
    },
    "two forms": {"structured_outputs": StructuredOutputsParams(regex="a", json_object=True)},
    "form without a tokenizer": {"structured_outputs": StructuredOutputsParams(regex="a")},
    "adapter without a place": lora("a", 0, "/a"),
    "adapter beyond C": lora("a", BEYOND, "/a"),
    "adapter without a name": lora("", 1, "/a"),
    "adapter with a NUL": lora("a", 1, "/a\0b"),
    "adapter of a huge name": lora("a", 1, "x" * 5000),
    "adapter that is no directory": lora("a", 1, "/dev/zero"),
    "embeddings of NaN": {"prompt_embeds": Array("float32", (2, HIDDEN), b"\xff" * 256)},
    "embeddings of integers": {"prompt_embeds": Array("int32", (3, HIDDEN), bytes(384))},
    "embeddings of another width": {"prompt_embeds": Array("float32", (3, 8), bytes(96))},
    "embeddings of another length": {"prompt_embeds": Array("float32", (4, HIDDEN), bytes(512))},
    "embeddings of nothing": {"prompt_embeds": Array("float32", (0, HIDDEN), b"")},
    "hand-off that is a list": {"extra_args": {"kv_transfer_params": [1]}},
    "hand-off with words for numbers": hand_off(remote_num_tokens="two"),
    "hand-off of other blocks": hand_off(remote_block_ids=[[0, 1]]),
    "hand-off beyond the context": hand_off(first_token_ids=[1] * MAX_LENGTH),
    "hand-off beyond the vocabulary": hand_off(first_token_ids=[VOCABULARY]),
}  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
def test_contract_M03_what_cannot_be_served_is_answered_with_an_error(
    core: EngineCore, usual: list[int], fields: dict[str, Any]
) -> None:
    outputs = run(core, as_received(core_request("bad", PROMPT, **fields)))["bad"]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error
    assert generate(core, PROMPT, max_tokens=4) == usual


@pytest.mark.parametrize(
    "fields", [{"task": "classify"}, {"dimensions": 0}, {"dimensions": BEYOND}], ids=str
)
def test_contract_C04_pooling_that_cannot_be_is_answered_with_an_error(
    core: EngineCore, usual: list[int], fields: dict[str, Any]
) -> None:
    outputs = run(core, as_received(pooling(**fields)))["bad"]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert generate(core, PROMPT, max_tokens=4) == usual


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": BEYOND},
        {"data_parallel_rank": -BEYOND},
        {"priority": BEYOND},
        {"eos_token_id": -BEYOND, "min_tokens": 2},
        {"current_wave": BEYOND},
        {"logprobs": 20},
        {"cache_salt": "\0" * 10_000},
        {"trace_headers": {"": "\0"}},
    ],
    ids=str,
)
def test_odd_values_that_mean_nothing_change_nothing(
    core: EngineCore, usual: list[int], fields: dict[str, Any]
) -> None:
    assert (
        tokens(run(core, as_received(core_request("odd", PROMPT, max_tokens=4, **fields)))["odd"])
        == usual
    )


@each(
    "decoder",
    [wire.request_decoder, wire.utility_decoder, wire.abort_decoder],
    ids=["request", "utility", "abort"],
)
@each(
    "value",
    [
        b"\x91" * 100_000,
        b"\x81" * 100_000,
        b"\x81\x81\x01\x02\x03",
        b"\xdd\xff\xff\xff\xff",
        b"\xd4\x05\x01",
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\xa2\xff\xfe",
        b"",
    ],
    ids=["lists", "maps", "map as a key", "length", "extension", "time", "text", "nothing"],
)
def test_malformed_bytes_are_errors_of_the_kind_that_a_core_drops(
    decoder: Any, value: bytes
) -> None:
    """Where the types leave a place open, and where they do not."""
    inside = {
        wire.request_decoder: core_request("bad", PROMPT, extra_args={"a": "here"}),
        wire.utility_decoder: UtilityCall(0, 1, "stats", ["here"]),
        wire.abort_decoder: ["here"],
    }[decoder]
    payload = msgspec.msgpack.encode(inside).replace(b"\xa4here", value)
    with pytest.raises(UNREADABLE):
        decoder.decode([payload])


ODD: list[Any] = [None, -1, BEYOND, "x", b"\0", [1], {"a": 1}, True, 1.5, [[]], [None] * 9]


def test_contract_M08_calls_with_any_arguments_fail_alone(
    core: EngineCore, usual: list[int]
) -> None:
    safe = set(core.utilities) - {"drain"}  # which cannot be taken back
    for method in sorted(safe):
        for arguments in ([], *([value] for value in ODD), *([value, value] for value in ODD)):
            try:
                answer = core.call(method, arguments)
            except DiptychError:
                continue
            if isinstance(answer, Future):
                step(core)
                core.deferred.settle()
        if method in {"pause_generation", "sleep"}:
            core.call("wake_up", [])
    assert generate(core, PROMPT, max_tokens=4) == usual


def test_contract_B09_a_piece_that_cannot_be_ends_its_session_alone(
    core: EngineCore, usual: list[int]
) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt": []},
        {"prompt": [VOCABULARY]},
        {"prompt": [1] * MAX_LENGTH},
        {"prompt": [1], "arrival_time": float("nan")},
        {"prompt": [1], "top_p": 2.0},
        {"prompt": [1], "prompt_logprobs": 1},
    ]
    for fields in bad:
        core.add(core_request("session", PROMPT, max_tokens=1, resumable=True), CLIENT)
        assert step(core)[-1].piece_finish_reason is FinishReason.LENGTH
        piece = {"max_tokens": 1, "resumable": True, **fields}
        core.add(as_received(core_request("session", **piece)), CLIENT)
        [last] = step(core)
        assert last.finish_reason is FinishReason.ERROR, fields
        assert not core.scheduler.requests
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    assert generate(core, PROMPT, max_tokens=4) == usual
