"""What the older client makes of messages that no engine sends: rows Q5, Q8, Q10 and Q13."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_kit.fake_core import SILENCE, FakeCore, failed, said
from engine_kit.mq import Eventually, endpoint, fake_client, reading

from diptych_protocol import EngineCoreOutput, EngineDeadError, EngineGenerateError, UtilityError


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
    tmp_path: Path, answer: Any, error: type[Exception], words: str
) -> None:
    core = FakeCore(endpoint(tmp_path), describe=answer)
    client = fake_client(tmp_path, rpc_timeout_ms=200 if answer is SILENCE else 10_000)
    with pytest.raises(error, match=words):
        await client.setup()
    assert client.health_loop is None
    client.close()
    await core.close()


async def test_contract_Q08_an_error_of_a_batch_is_that_of_its_requests(
    tmp_path: Path, fake: FakeCore
) -> None:
    client = fake_client(tmp_path)
    await client.setup()
    tasks = reading(client, "a", "b")
    await fake.tell(*(failed(request, "out of memory") for request in await fake.added(2)))
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(end, EngineGenerateError)
    assert client.is_running
    client.close()


async def test_contract_Q08_an_answer_that_cannot_be_read_ends_what_may_wait_for_it(
    tmp_path: Path, fake: FakeCore
) -> None:
    client = fake_client(tmp_path)
    await client.setup()
    [task] = reading(client, "r")
    await fake.added(1)
    await fake.send(b"\xc1 is no message")
    with pytest.raises(EngineDeadError, match="cannot be read"):
        await task
    assert not client.output_queues
    client.close()


async def test_contract_Q10_outputs_of_unknown_requests_are_dropped(
    tmp_path: Path, fake: FakeCore
) -> None:
    client = fake_client(tmp_path)
    await client.setup()
    [task] = reading(client, "r")
    [request] = await fake.added(1)
    await fake.tell(EngineCoreOutput("never heard of", [1]), said(request, 2, ends=True))
    await fake.tell(said(request, 3))
    assert await task == [2]
    assert not client.errored
    client.close()


@pytest.mark.parametrize(
    ("frame", "answer", "error", "words"),
    [
        (b"\xc1 is no message", None, ValueError, "^Heartbeat failed"),
        (None, RuntimeError("unwell"), UtilityError, "unwell"),
    ],
)
async def test_contract_Q13_a_heartbeat_that_is_none_is_the_engines_error(
    tmp_path: Path,
    fake: FakeCore,
    eventually: Eventually,
    frame: bytes | None,
    answer: Any,
    error: type[Exception],
    words: str,
) -> None:
    client = fake_client(tmp_path)
    if answer is not None:
        fake.answers["stats"] = answer
    await client.setup()
    await eventually(lambda: fake.calls("stats"))
    if frame is not None:
        await fake._socket.send_multipart([fake.heard[-1][0], frame])
    assert client.health_loop is not None
    await client.health_loop
    with pytest.raises(error, match=words):
        await client.check_health()
    client.close()
