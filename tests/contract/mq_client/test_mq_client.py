"""The older client's behaviour, over today's wire: rows Q1 to Q5, Q9 to Q13, Q15 and Q17."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from engine_kit.fake_core import SILENCE, FakeCore, said
from engine_kit.mq import CONFIG, Eventually, Process, endpoint, make_client, read, reading

from diptych_engine import MQLLMEngineClient
from diptych_frontend.v0.errors import MQClientClosedError
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequestType,
    EngineDeadError,
    InvalidRequestError,
    LoRARequest,
    UtilityError,
)

# --- the wire ---------------------------------------------------------------------------------


async def test_contract_Q01_one_socket_has_every_role(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    [task] = reading(client, "r")
    [request] = await fake.added(1)
    await fake.tell(said(request, 7), said(request, 8))
    await client.take_pulse()
    task.cancel()
    assert await fake.aborted() == [request.request_id]
    assert {who for who, _, _ in fake.heard} == {fake.heard[0][0]}
    assert [kind for _, kind, _ in fake.heard] == [
        EngineCoreRequestType.UTILITY,  # the greeting
        EngineCoreRequestType.ADD,
        EngineCoreRequestType.UTILITY,  # the heartbeat
        EngineCoreRequestType.ABORT,
    ]


@pytest.mark.parametrize(("size", "unsupported"), [(1, False), (2, True), (8, True)])
def test_contract_Q02_layers_are_not_split_over_processes(size: int, unsupported: bool) -> None:
    config = msgspec.structs.replace(CONFIG, pipeline_parallel_size=size)
    assert MQLLMEngineClient.is_unsupported_config(config) is unsupported
    if unsupported:
        with pytest.raises(InvalidRequestError, match="pipeline_parallel_size must be 1"):
            config.check()


async def test_contract_Q03_setup_may_be_repeated(
    tmp_path: Path, process: Process, fake: FakeCore
) -> None:
    client = make_client(tmp_path, process)
    await asyncio.gather(*(client.setup() for _ in range(5)))
    await client.setup()
    assert fake.calls("describe") == 1
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert (names.count("core watcher"), names.count("engine health")) == (1, 1)
    [task] = reading(client, "r")
    [request] = await fake.added(1)
    for token in range(40):
        await fake.tell(said(request, token, ends=token == 39))
    assert await task == list(range(40))
    client.close()


async def test_contract_Q04_failures_leave_no_socket(
    client: MQLLMEngineClient, eventually: Eventually
) -> None:
    before = psutil.Process().num_fds()
    for _ in range(1000):
        with pytest.raises(RuntimeError), client.get_data_socket():
            raise RuntimeError
    # ZMQ's own threads close descriptors.
    await eventually(lambda: psutil.Process().num_fds() <= before + 2)


async def test_contract_Q04_a_failed_call_leaves_nothing(
    client: MQLLMEngineClient, fake: FakeCore, eventually: Eventually
) -> None:
    fake.answers["stats"] = RuntimeError("no")
    before = psutil.Process().num_fds()
    for _ in range(200):
        with pytest.raises(UtilityError):
            await client.refresh_stats()
    await eventually(lambda: psutil.Process().num_fds() <= before + 2)
    assert client._cores.members[0].client._calls == {}


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (SILENCE, TimeoutError, "didn't reply within 200 ms"),
        (RuntimeError("the model is gone"), UtilityError, "the model is gone"),
        ({"engine_id": 7}, ValueError, "Unable to start RPC Server"),
        ("READY", ValueError, "Unable to start RPC Server"),
    ],
)
async def test_contract_Q05_the_greeting_must_be_answered(
    tmp_path: Path, process: Process, answer: Any, error: type[Exception], words: str
) -> None:
    core = FakeCore(endpoint(tmp_path), describe=answer)
    client = make_client(tmp_path, process, rpc_timeout_ms=200 if answer is SILENCE else 10_000)
    with pytest.raises(error, match=words):
        await client.setup()
    client.close()
    await core.close()


async def test_contract_Q05_nobody_there_is_a_timeout_too(tmp_path: Path, process: Process) -> None:
    client = make_client(tmp_path, process, rpc_timeout_ms=200)
    with pytest.raises(TimeoutError, match="200 ms"):
        await client.setup()
    client.close()


# --- requests ---------------------------------------------------------------------------------


async def test_contract_Q09_an_id_may_run_once_at_a_time(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    [task] = reading(client, "same")
    [request] = await fake.added(1)
    with pytest.raises(ValueError, match="Request same already exists"):
        await read(client, "same")
    assert list(client.output_queues) == ["same"]
    await fake.tell(said(request, 5, ends=True))
    assert await task == [5]
    [again] = reading(client, "same")
    await fake.tell(said((await fake.added(2))[1], 6, ends=True))
    assert await again == [6]


async def test_contract_Q09_a_dead_engine_refuses_at_once(
    client: MQLLMEngineClient, process: Process, eventually: Eventually
) -> None:
    process.kill()
    await eventually(lambda: client.errored)
    with pytest.raises(EngineDeadError) as caught:
        await read(client, "late")
    assert caught.value is client.dead_error


@pytest.mark.parametrize("turns", range(6))
async def test_contract_Q09_whenever_a_reader_leaves_nothing_is_left(
    tmp_path: Path, process: Process, fake: FakeCore, turns: int
) -> None:
    client = make_client(tmp_path, process)
    if turns > 2:
        await client.setup()
    [task] = reading(client, "r")
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not client.output_queues
    if client._cores.is_ready:
        for request in await fake.added(0):
            assert request.request_id in await fake.aborted()
    client.close()


async def test_contract_Q09_a_prompt_that_is_refused_leaves_nothing(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    with pytest.raises(InvalidRequestError):
        await read(client, "bad", prompt=[10**9])
    assert not client.output_queues
    assert await fake.added(0) == []


async def test_contract_Q10_outputs_of_unknown_requests_are_dropped(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    [task] = reading(client, "r")
    [request] = await fake.added(1)
    await fake.tell(EngineCoreOutput("never heard of", [1]), said(request, 2, ends=True))
    await fake.tell(said(request, 3))
    assert await task == [2]
    assert not client.errored


async def test_contract_Q11_an_abort_after_the_end_is_quiet(client: MQLLMEngineClient) -> None:
    client.close()
    await client.abort("anything")
    await client.abort(["one", "another"])


async def test_contract_Q12_every_call_after_the_end_says_so(client: MQLLMEngineClient) -> None:
    client.close()
    lease = {
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "lease_id": "0" * 32,
        "epoch": "e",
        "compat": "c",
        "expires_at": 1,
        "proof": "00",
    }
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: read(client, "r"),
        client.setup,
        client.refresh_stats,
        client.reset_prefix_cache,
        client.list_loras,
        lambda: client.add_lora(LoRARequest("name", 1, "/nowhere")),
        lambda: client.notify_kv_transfer_request_rejected("r", lease),
        client.drain_report,
        client.check_health,
        client.check_live,
    ]
    for call in calls:
        with pytest.raises(MQClientClosedError):
            await call()
    with pytest.raises(MQClientClosedError), client.get_data_socket():
        pass


async def test_contract_Q13_an_acknowledgement_may_fail_in_three_ways(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    [member] = client._cores.members
    fake.answers["stats"] = SILENCE
    with pytest.raises(TimeoutError):
        await member.refresh_stats(0.05)
    fake.answers["stats"] = "SUCCESS?"
    with pytest.raises(ValueError, match="stats: the answer is malformed"):
        await member.refresh_stats()
    fake.answers["stats"] = RuntimeError("no")
    with pytest.raises(UtilityError, match="no"):
        await member.refresh_stats()


async def test_contract_Q15_questions_are_answered_while_others_generate(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    fake.answers |= {"add_lora": True, "list_loras": [3], "is_sleeping": False}
    [task] = reading(client, "r")
    [request] = await fake.added(1)
    assert await client.add_lora(LoRARequest("name", 3, "/somewhere")) is True
    await fake.tell(said(request, 1))
    assert await client.list_loras() == {3}
    assert await client.is_sleeping() is False
    await fake.tell(said(request, 2, ends=True))
    assert await task == [1, 2]


async def test_contract_Q16_commands_reach_the_engine_as_they_were_given(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    """V0 did not wait for an answer; here each is acknowledged, so that a failure is known."""
    commands: list[tuple[Awaitable[Any], str, list[Any]]] = [
        (client.start_profile(), "start_profile", [""]),
        (client.stop_profile(), "stop_profile", []),
        (client.reset_mm_cache(), "reset_mm_cache", []),
        (client.reset_prefix_cache(), "reset_prefix_cache", [False, False]),
        (client.sleep(2), "sleep", [2, "abort"]),
        (client.wake_up(["weights"]), "wake_up", [["weights"]]),
    ]
    for command, method, args in commands:
        fake.answers[method] = None
        await command
        _, kind, call = fake.heard[-1]
        assert (kind, call.method, call.args) == (EngineCoreRequestType.UTILITY, method, args)
        fake.answers[method] = RuntimeError("the engine cannot")
    with pytest.raises(UtilityError, match="the engine cannot"):
        await client.sleep(1)


# --- the rest ---------------------------------------------------------------------------------


async def test_contract_Q17_getters_tell_what_the_client_was_made_of(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    assert await client.get_vllm_config() is CONFIG
    assert await client.get_model_config() is client.model_config
    assert await client.get_input_preprocessor() is client.input_processor
    assert await client.get_decoding_config() is None  # type: ignore[func-returns-value]
    assert await client.is_tracing_enabled() is False
    with pytest.raises(InvalidRequestError, match="token ids"):
        await client.get_tokenizer(LoRARequest("name", 3, "/somewhere"))
    before = len(fake.heard)
    await client.do_log_stats()
    assert len(fake.heard) == before, "the server logs its own"


async def test_contract_Q01_a_real_core_serves_one_client_after_the_other(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "diptych_engine.serving.core_process",
        "--local",
        endpoint(tmp_path),
    ]
    command += ["--config", msgspec.json.encode(CONFIG).decode(), "--parent-pid", str(os.getpid())]
    core = subprocess.Popen(command)
    answers = []
    try:
        for _ in range(2):
            client = make_client(tmp_path, core, rpc_timeout_ms=60_000)
            await client.setup()
            answers.append(await read(client, "r"))
            client.close()
    finally:
        core.kill()
        core.wait()
    assert [len(answer) for answer in answers] == [50, 50]
