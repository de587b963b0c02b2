"""An EngineCore process driven by hand-written bytes: what a stranger sends cannot harm it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from drawn_seed import drawn_seed
from engine_kit.wire import ABORT, ADD, FAILED, TIMEOUT_MS, UTILITY, WAVE, Client, request, start
from waits import PATIENCE_S, Deadline

from diptych_frontend.core_client.client import CoreClient
from diptych_protocol import (
    EngineDeadError,
    FinishReason,
    UtilityCall,
    wire,
)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A core with a 2-layer random model and room for 64 blocks."""
    path = f"ipc://{tmp_path_factory.mktemp('core')}/core"
    process = start(path)
    yield path
    process.terminate()
    assert process.wait(PATIENCE_S) == 0, "SIGTERM ends a core cleanly"


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    client = Client(endpoint)
    yield client
    deadline = Deadline("all blocks are free")
    while (stats := client.stats()).blocks_free < stats.blocks_total:
        deadline.check()
    client.socket.close()


def test_contract_M07_a_request_in_bytes_is_answered_in_bytes(client: Client) -> None:
    client.add("a")
    tokens, reason, error = client.read("a")
    assert (len(tokens), reason, error) == (5, FinishReason.LENGTH, None)
    client.add("b")
    assert client.read("b")[0] == tokens, "greedy is deterministic"


def test_a_core_says_what_it_is(client: Client) -> None:
    description = client.call("describe")
    assert description["num_blocks"] == 64
    assert description["max_model_len"] == 64 * 16
    assert description["epoch"]


def test_contract_M05_a_message_names_its_core_and_the_requests_that_ended(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/core"
    process = start(path, data_parallel_size=2, data_parallel_rank=1)
    client = Client(path)
    client.add("short", max_tokens=2)
    client.add("aborted", max_tokens=500)
    ended: list[str] = []
    while len(ended) < 2:
        message = client.receive()
        assert message.engine_index == 1
        last = {output.request_id for output in message.outputs if output.finished}
        assert (message.finished_requests or set()) == last
        ended += last
        if last == {"short"}:
            client.abort(["aborted"])
    assert ended == ["short", "aborted"]
    client.socket.close()
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


def test_contract_M05_a_step_is_one_message_to_each_client(client: Client, endpoint: str) -> None:
    other, control = Client(endpoint), Client(endpoint)
    control.call("pause_generation", "keep", False)  # so that all of them begin together
    names = {client: {"a", "b", "c"}, other: {"d", "e"}}
    for owner, own in names.items():
        for name in own:
            owner.add(name, max_tokens=20)
    deadline = Deadline("all requests have come")
    while control.stats().num_waiting < 5:
        deadline.check()
    control.call("resume_generation")
    for owner, own in names.items():
        told: list[set[str]] = []
        while len(told) < 20:
            message = owner.receive()
            told += [{output.request_id for output in message.outputs}] if message.outputs else []
        assert told == [own] * 20
        assert message.finished_requests == own
    other.socket.close()
    control.socket.close()


def test_a_call_that_nobody_waits_for_has_no_answer(client: Client) -> None:
    for call_id, method in ((-1, "describe"), (-2, "no such method"), (7, "describe")):
        client.send(UTILITY, msgspec.msgpack.encode(UtilityCall(0, call_id, method, [])))
    answer = client.receive().utility_output
    assert answer is not None
    assert answer.call_id == 7


BROKEN_REQUESTS = {
    "a field of another type": request("broken", max_tokens=2.5),
    "a flag for a number": request("broken", seed=True),
    "a text for a list": request("broken", bad_words="Paris"),
    "a field that does not exist": ["broken", [1], None, {"wishes": 3}, None, None, 0.0],
    "too few fields": ["broken"],
}


@pytest.mark.parametrize("message", BROKEN_REQUESTS.values(), ids=BROKEN_REQUESTS.keys())
def test_a_request_that_cannot_be_read_is_answered_under_its_id(
    client: Client, message: Any
) -> None:
    before = client.stats().malformed_messages
    client.send(ADD, msgspec.msgpack.encode(message))
    tokens, reason, error = client.read("broken")
    assert (tokens, reason) == ([], FinishReason.ERROR)
    assert error is not None
    assert "cannot be read" in error
    assert client.stats().malformed_messages == before + 1


def test_half_a_request_is_answered_under_its_id(client: Client) -> None:
    whole = msgspec.msgpack.encode(request("half"))
    client.send(ADD, whole[: len(whole) // 2])
    assert client.read("half")[1] is FinishReason.ERROR


def test_what_cannot_be_read_does_not_end_the_request_that_runs_under_its_id(
    client: Client,
) -> None:
    client.add("twice", max_tokens=200, ignore_eos=True)
    client.send(ADD, msgspec.msgpack.encode(request("twice", max_tokens=2.5)))
    tokens, reason, _ = client.read("twice")
    assert (len(tokens), reason) == (200, FinishReason.LENGTH)


def test_a_session_whose_next_piece_cannot_be_read_ends(client: Client) -> None:
    first = request("session", max_tokens=1)
    first.resumable = True
    client.send(ADD, msgspec.msgpack.encode(first))
    assert client.receive().outputs[0].piece_finish_reason is FinishReason.LENGTH
    client.send(ADD, msgspec.msgpack.encode(request("session", seed=True)))
    assert client.read("session")[1] is FinishReason.ERROR


@pytest.mark.parametrize("message", [[0, 77, "stats"], [0, 77, 5, []], [0, 77, "stats", {}]])
def test_a_call_that_cannot_be_read_is_answered(client: Client, message: Any) -> None:
    client.send(UTILITY, msgspec.msgpack.encode(message))
    answer = client.receive().utility_output
    assert answer is not None
    assert answer.call_id == 77
    assert "cannot be read" in (answer.failure_message or "")


def test_what_names_nobody_is_counted(client: Client) -> None:
    before = client.stats().malformed_messages
    for frames in ((ADD, b"\xc1"), (ABORT, b"\x01"), (UTILITY, b"\x91\xa1a"), (b"?", b""), (b"",)):
        client.send(*frames)
    assert client.stats().malformed_messages == before + 5


def test_contract_C07_an_abort_ends_a_request_and_unknown_ids_are_ignored(client: Client) -> None:
    client.add("long", max_tokens=900, ignore_eos=True)
    client.receive()
    client.send(ABORT, msgspec.msgpack.encode(["long", "never heard of"]))
    assert client.read("long")[1] is FinishReason.ABORT


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [10**6]}, "token ids"),
        ({"prompt": [-1]}, "token ids"),
        ({"prompt": [1] * 2000}, "no room"),
        ({"temperature": -1.0}, "temperature"),
        ({"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}, "hand-offs"),
        ({"extra_args": {"kv_transfer_params": 3}}, "kv_transfer_params"),
    ],
)
def test_a_request_that_cannot_work_is_answered_with_its_reason(
    client: Client, change: dict[str, Any], complaint: str
) -> None:
    client.add("bad", **change)
    tokens, reason, error = client.read("bad")
    assert (tokens, reason) == ([], FinishReason.ERROR)
    assert error is not None
    assert complaint in error


def test_an_engine_without_a_hinge_hands_nothing_off(client: Client) -> None:
    client.add("stays", max_tokens=300, ignore_eos=True)
    client.receive()
    assert client.call("hand_off", "stays") is False
    assert client.call("hand_off", "never heard of") is False
    assert "hand_off" in client.call("hand_off", ["not", "a", "name"])
    assert client.read("stays")[1] is FinishReason.LENGTH


def test_a_draining_core_tells_all_clients_at_once_and_serves_on(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/core"
    process = start(path)
    idle, busy = Client(path), Client(path)
    assert idle.call("drain_report")["draining"] is False
    busy.add("open", max_tokens=900, ignore_eos=True)
    busy.receive()
    report = busy.call("drain")
    assert (report["draining"], report["drained"], report["num_running"]) == (True, False, 1)
    told = idle.receive()
    assert told.outputs == []
    assert told.scheduler_stats is not None
    assert told.scheduler_stats.draining
    late = Client(path)
    late.add("late")
    assert late.read("late")[1] is FinishReason.LENGTH
    busy.send(ABORT, msgspec.msgpack.encode(["open"]))
    assert busy.read("open")[1] is FinishReason.ABORT
    assert busy.call("drain_report")["drained"] is True
    assert idle.socket.poll(100) == 0, "they are told once"
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    for client in (idle, busy, late):
        client.socket.close()


@pytest.mark.parametrize("method", ["no_such", "close", "__class__", "runner"])
def test_only_declared_methods_can_be_called(client: Client, method: str) -> None:
    assert "no utility method" in client.call(method)


def test_contract_M08_wrong_arguments_fail_the_call_only(client: Client) -> None:
    assert "stats" in client.call("stats", 1, 2, 3)
    assert client.call("describe")["num_blocks"] == 64


@pytest.mark.parametrize(
    "frames",
    [
        (b"",), (b"\xff", b""), (ADD,), (ADD, b""), (ADD, b"\xc1"), (ADD, b"\x90"),
        (ABORT, b"\x01"), (UTILITY, b"\x80"), (WAVE, b"\x90"), (FAILED, b""), (ADD, b"x", b"y"),
        (b"\x00\x00", b""), tuple(b"" for _ in range(50)),
    ],
    ids=str,
)  # fmt: skip
def test_contract_M07_garbage_is_dropped_and_the_core_lives(
    client: Client, frames: tuple[bytes, ...]
) -> None:
    client.send(*frames)
    client.add("canary")
    assert client.read("canary")[1] is FinishReason.LENGTH


def test_contract_M07_mutated_messages_do_not_kill_a_core(client: Client) -> None:
    rng = random.Random(drawn_seed())
    stranger = Client(client.socket.getsockopt_string(zmq.LAST_ENDPOINT))
    good = [
        (ADD, msgspec.msgpack.encode(request("m", max_tokens=2))),
        (ABORT, msgspec.msgpack.encode(["m"])),
        (UTILITY, msgspec.msgpack.encode(UtilityCall(0, 1, "stats", []))),
    ]
    for _ in range(int(os.environ.get("DIPTYCH_TEST_FRAMES", "3000"))):
        kind, payload = rng.choice(good)
        mutated = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        stranger.send(rng.choice([kind, kind, rng.randbytes(1)]), bytes(mutated))
    stranger.socket.close()
    client.add("canary")
    assert client.read("canary")[1] is FinishReason.LENGTH


async def test_contract_M08_pending_calls_fail_when_the_core_dies(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/core"
    process = start(path)
    client = CoreClient(path, None, on_outputs=lambda _: None, on_lost=lambda _: None)
    await client.describe(TIMEOUT_MS / 1000)
    process.send_signal(signal.SIGSTOP)  # it will not answer
    calls = [asyncio.create_task(client.call("stats")) for _ in range(3)]
    await asyncio.sleep(0)
    process.kill()
    for answer in await asyncio.wait_for(
        asyncio.gather(*calls, return_exceptions=True), PATIENCE_S
    ):
        assert isinstance(answer, EngineDeadError)
    client.close()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_client_that_vanishes_frees_its_blocks(endpoint: str, client: Client) -> None:
    leaver = Client(endpoint)
    leaver.add("left", max_tokens=1000, ignore_eos=True)
    leaver.receive()
    assert client.stats().num_running == 1
    leaver.socket.close()  # the client fixture waits for the blocks


def test_more_requests_than_the_queue_holds_are_refused_as_overload(client: Client) -> None:
    for index in range(60):
        client.add(f"q{index}", max_tokens=200, ignore_eos=True)
    errors = []
    client.send(ABORT, msgspec.msgpack.encode([f"q{i}" for i in range(60)]))
    ended = 0
    while ended < 60:
        for output in client.receive().outputs:
            ended += output.finished
            errors += [output.error] if output.error else []
    assert errors
    assert all("overloaded" in error for error in errors)


def test_a_dying_core_says_so(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/core"
    process = start(path)
    client = Client(path)
    client.add("doomed", max_tokens=1000, ignore_eos=True)
    client.receive()
    process.send_signal(signal.SIGTERM)
    last = b""
    while last != wire.ENGINE_CORE_DEAD:
        assert client.socket.poll(TIMEOUT_MS), "no word of its end"
        last = client.socket.recv()
    assert process.wait(PATIENCE_S) == 0
    client.socket.close()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model": "/no/such/file.gguf"}, "does not exist"),
        pytest.param({"model": "dummy://", "block_size": 12}, "block_size", marks=pytest.mark.slow),
        pytest.param({"model": "dummy://?colour=red"}, "colour", marks=pytest.mark.slow),
    ],
)
def test_a_core_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, config: dict[str, Any], complaint: str
) -> None:
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "diptych_engine.serving.core_process"),
            *("--local", f"ipc://{tmp_path}/core", "--config", json.dumps(config)),
            *("--parent-pid", str(os.getpid())),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert answer.returncode == 2
    assert complaint in answer.stderr.splitlines()[-1]
