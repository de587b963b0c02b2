"""What the older client makes of messages that no engine sends: rows Q5, Q8, Q10 and Q13."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_kit.fake_core import SILENCE, FakeCore, failed, said
from engine_kit.mq import Eventually, endpoint, fake_client, reading

from diptych_frontend.v0.rpc import RPCHeartbeatRequest, frames_of
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


async def test_contract_Q06_Q13_an_acknowledgement_that_is_none_says_whose_it_is(
    tmp_path: Path, fake: FakeCore, eventually: Eventually
) -> None:
    client = fake_client(tmp_path)
    with client.get_data_socket() as socket:
        await socket.send_multipart(frames_of(RPCHeartbeatRequest.HOW_ARE_YOU))
        await client._await_ack("no heartbeat", socket)
        await fake.send(b"\xc1 is no message")
        with pytest.raises(ValueError, match=r"^no heartbeat$"):
            await client._await_ack("no heartbeat", socket)
    await client.setup()
    await eventually(lambda: fake.calls("stats") == 2)
    heart, _, _ = fake.heard[-1]
    await fake._socket.send_multipart([heart, b"\xc1 is no message"])
    assert client.health_loop is not None
    await client.health_loop
    with pytest.raises(ValueError, match="Heartbeat failed"):
        await client.check_health()
    client.close()
