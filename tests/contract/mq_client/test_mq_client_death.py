"""How the older client sees its engine die, and ends itself: rows Q6 to Q8, Q14, Q18, Q20."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import psutil
import pytest
from engine_kit.fake_core import SILENCE, FakeCore, failed, said
from engine_kit.mq import Eventually, Process, make_client, reading

from diptych_engine import MQLLMEngineClient
from diptych_protocol import (
    EngineDeadError,
    EngineGenerateError,
    UtilityError,
    wire,
)


async def test_contract_Q06_a_dead_process_is_noticed_though_nobody_buried_it(
    client: MQLLMEngineClient, process: Process, eventually: Eventually
) -> None:
    assert not client.errored
    process.kill()
    await eventually(lambda: client.errored)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(EngineDeadError, match=rf"Engine process \(pid {process.pid}\) died\."):
        await client.check_health()


async def test_contract_Q06_a_process_that_is_gone_already_is_an_error_at_once(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    client = make_client(tmp_path, process)
    assert client.errored
    with pytest.raises(EngineDeadError, match="died"):
        await client.setup()
    client.close()


async def test_contract_Q06_an_error_in_a_heartbeat_is_the_engines(
    tmp_path: Path, process: Process, fake: FakeCore, eventually: Eventually
) -> None:
    fake.answers["stats"] = SILENCE
    client = make_client(tmp_path, process, heartbeat_ms=10)
    await client.setup()
    await eventually(lambda: fake.calls("stats") == 1)
    assert not client.errored, "silence proves nothing"
    client.close()
    client = make_client(tmp_path, process, heartbeat_ms=10)
    fake.answers["stats"] = RuntimeError("out of memory")
    await client.setup()
    await eventually(lambda: client.errored)
    with pytest.raises(UtilityError, match="out of memory"):
        await client.check_health()
    client.close()


async def test_contract_Q07_a_silent_death_ends_every_request(
    client: MQLLMEngineClient, process: Process, fake: FakeCore
) -> None:
    tasks = reading(client, "a", "b", "c")
    await fake.added(3)
    process.kill()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(end, EngineDeadError)
    assert not client.output_queues


async def test_contract_Q08_an_error_of_one_request_is_its_own(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    tasks = reading(client, "a", "poisoned", "c")
    a, poisoned, c = await fake.added(3)
    await fake.tell(failed(poisoned, "bad numbers"))
    await fake.tell(said(a, 1, ends=True), said(c, 2, ends=True))
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert (ends[0], ends[2]) == ([1], [2])
    assert isinstance(ends[1], EngineGenerateError)
    assert "bad numbers" in str(ends[1])
    assert not client.errored


async def test_contract_Q08_an_error_of_a_batch_is_that_of_its_requests(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    tasks = reading(client, "a", "b")
    await fake.tell(*(failed(request, "out of memory") for request in await fake.added(2)))
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(end, EngineGenerateError)
    assert client.is_running


async def test_contract_Q08_of_two_fatal_errors_the_first_is_kept(
    client: MQLLMEngineClient, process: Process, fake: FakeCore, eventually: Eventually
) -> None:
    [task] = reading(client, "a")
    await fake.added(1)
    await fake.send(wire.ENGINE_CORE_DEAD)
    await eventually(lambda: client.errored)
    process.kill()
    await asyncio.sleep(0.05)  # the second one is seen, and changes nothing
    with pytest.raises(EngineDeadError, match="has ended") as waited:
        await task
    assert waited.value is client.dead_error
    assert "died" not in str(client.dead_error)


async def test_contract_Q08_an_answer_that_cannot_be_read_ends_what_may_wait_for_it(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    [task] = reading(client, "r")
    await fake.added(1)
    fake.answers["stats"] = SILENCE
    [member] = client._cores.members
    question = asyncio.create_task(member.refresh_stats())
    await fake.added(1)
    await fake.send(b"\xc1 is no message")
    for waiting in (task, question):
        with pytest.raises(EngineDeadError, match="cannot be read"):
            await waiting
    assert not client.output_queues


async def test_contract_Q14_health_is_the_first_cause_itself(
    client: MQLLMEngineClient, fake: FakeCore
) -> None:
    await client.check_health()
    fake.answers["stats"] = RuntimeError("out of memory")
    await client.take_pulse()
    raised = []
    for _ in range(2):
        with pytest.raises(UtilityError) as caught:
            await client.check_health()
        raised.append(caught.value)
    assert raised[0] is raised[1] is client.dead_error.__cause__


async def test_contract_Q18_running_is_what_is_not_errored(
    client: MQLLMEngineClient, process: Process, eventually: Eventually
) -> None:
    assert (client.is_running, client.is_stopped, client.errored) == (True, False, False)
    process.kill()
    await eventually(lambda: client.errored)
    assert (client.is_running, client.is_stopped, client.errored) == (False, True, True)
    assert isinstance(client.dead_error, EngineDeadError)
    assert "died" in str(client.dead_error)


async def test_contract_Q20_closing_leaves_no_task_and_no_descriptor(
    tmp_path: Path, process: Process, fake: FakeCore, eventually: Eventually
) -> None:
    warm = make_client(tmp_path, process)
    await warm.setup()
    warm.close()
    tasks = len(asyncio.all_tasks())
    await asyncio.sleep(0.05)
    before = psutil.Process().num_fds()
    for _ in range(20):
        client = make_client(tmp_path, process)
        await client.setup()
        client.close()
        client.close()
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
    await eventually(lambda: psutil.Process().num_fds() <= before + 2)
    assert process.poll() is None, "the engine lives on"
