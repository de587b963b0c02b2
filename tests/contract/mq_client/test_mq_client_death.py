"""How the older client sees a real engine die, and ends itself: rows Q6 to Q9, Q14, Q18, Q20."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import psutil
import pytest
from engine_kit.failing_executor import POISON
from engine_kit.mq import (
    DOOMED,
    LONG,
    PATIENCE_MS,
    Eventually,
    answer,
    client_of,
    read,
    reading,
    real_with,
    running,
)

from diptych_engine import MQLLMEngineClient
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.v0.sockets import MQEngineDeadError
from diptych_protocol import (
    EngineDeadError,
    EngineGenerateError,
    LoRARequest,
    SamplingParams,
    UtilityError,
)

POISONED = [POISON, 5, 6]
POISON_TAKER = real_with(executor_class="engine_kit.failing_executor:FailingExecutor")


async def ends_of(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def read_on(outputs: AsyncIterator[Any]) -> None:
    async for _ in outputs:
        pass


async def under_way(client: MQLLMEngineClient, *names: str) -> list[asyncio.Task[list[int]]]:
    """Requests that are on their way to the engine."""
    tasks = reading(client, *names, length=LONG)
    while len(client.output_queues) < len(names):
        await asyncio.sleep(0.01)
    return tasks


# --- the process ------------------------------------------------------------------------------


async def test_contract_Q06_Q18_a_killed_engine_is_noticed_though_nobody_buried_it(
    mourner: MQLLMEngineClient, doomed: CoreProcess, eventually: Eventually
) -> None:
    assert (mourner.is_running, mourner.is_stopped, mourner.errored) == (True, False, False)
    pid = doomed.process.pid
    tasks = await under_way(mourner, "a", "b", "c")
    doomed.process.kill()
    await eventually(lambda: mourner.errored)
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert (mourner.is_running, mourner.is_stopped, mourner.errored) == (False, True, True)
    with pytest.raises(RuntimeError, match=rf"^Engine process \(pid {pid}\) died\.$"):
        await mourner.check_health()
    assert isinstance(mourner.dead_error, EngineDeadError)
    assert "died" in str(mourner.dead_error)
    for end in await ends_of(tasks):
        assert isinstance(end, MQEngineDeadError), "in the middle of their answers"
    assert not mourner.output_queues
    with pytest.raises(EngineDeadError, match="died"):
        await read(mourner, "late")
    with pytest.raises(EngineDeadError, match="died"):
        await mourner.sleep(1)
    await eventually(lambda: mourner.output_loop is not None and mourner.output_loop.done())
    await eventually(lambda: mourner.health_loop is not None and mourner.health_loop.done())


async def test_contract_Q06_the_loop_alone_sees_a_zombie(doomed: CoreProcess) -> None:
    """No connection has to tell it."""
    client = client_of(doomed)
    doomed.process.kill()
    await client.run_heartbeat_loop(timeout=10)
    assert client.errored
    with pytest.raises(RuntimeError, match="died"):
        await client.check_health()
    client.close()


async def test_contract_Q06_a_process_that_is_gone_already_is_an_error_at_once(
    doomed: CoreProcess,
) -> None:
    doomed.process.kill()
    doomed.process.wait()
    client = client_of(doomed)
    assert client.errored
    with pytest.raises(EngineDeadError, match="died"):
        await client.setup()
    client.close()


async def test_contract_Q05_an_engine_that_dies_while_it_starts_is_no_time_out(
    doomed: CoreProcess, eventually: Eventually
) -> None:
    client = client_of(doomed)  # as patient as any test
    doomed.process.send_signal(signal.SIGSTOP)  # it cannot have started
    greeting = asyncio.create_task(client.setup())
    await eventually(lambda: client._cores.members[0].is_watched)  # the greeting is on its way
    doomed.process.kill()
    with pytest.raises(EngineDeadError, match="died"):
        await greeting
    client.close()


async def test_contract_Q06_silence_is_no_proof(
    doomed: CoreProcess, eventually: Eventually
) -> None:
    client = client_of(doomed, heartbeat_ms=10)
    await client.setup()
    doomed.process.send_signal(signal.SIGSTOP)
    [task] = reading(client, "waits", length=3)
    await asyncio.sleep(0.3)  # many heartbeats that nobody answers
    assert not client.errored
    await client.check_health()
    doomed.process.send_signal(signal.SIGCONT)
    assert len(await task) == 3
    client.close()


async def test_contract_Q06_Q14_an_error_in_a_heartbeat_is_the_engines(
    eventually: Eventually,
) -> None:
    """An engine that was told to end refuses the question how it is."""
    patient = msgspec.structs.replace(DOOMED, shutdown_timeout_s=PATIENCE_MS / 1000)
    with running(patient) as core:
        client = client_of(core, heartbeat_ms=10)
        await client.setup()
        params = SamplingParams(max_tokens=LONG, ignore_eos=True)
        outputs = client.generate([1, 2, 3], params, "keeps it here")
        await anext(outputs)
        core.process.send_signal(signal.SIGTERM)
        await eventually(lambda: client.errored)
        raised = []
        for _ in range(2):
            with pytest.raises(UtilityError, match="shutting down") as caught:
                await client.check_health()
            raised.append(caught.value)
        assert raised[0] is raised[1] is client.dead_error.__cause__
        with pytest.raises(MQEngineDeadError, match="shutting down"):
            await read_on(outputs)
        client.close()


async def test_contract_Q07_a_silent_death_before_any_output_ends_every_request(
    mourner: MQLLMEngineClient, doomed: CoreProcess
) -> None:
    doomed.process.send_signal(signal.SIGSTOP)
    tasks = await under_way(mourner, "a", "b", "c")
    doomed.process.kill()
    for end in await ends_of(tasks):
        assert isinstance(end, EngineDeadError)
    assert not mourner.output_queues


# --- errors that the engine tells -------------------------------------------------------------


async def test_contract_Q08_an_error_of_one_request_is_its_own(client: MQLLMEngineClient) -> None:
    """The engine finds no adapter; to the others it says what it would have said."""
    alone = await read(client, "alone", length=20)
    tasks: list[asyncio.Task[Any]] = [*reading(client, "a", length=20)]
    nowhere = LoRARequest("poisoned", 9, "/nowhere")
    tasks.append(asyncio.create_task(answer(client, [1, 2], nowhere)))
    tasks += reading(client, "c", length=20)
    first, poisoned, last = await ends_of(tasks)
    assert first == last == alone
    assert isinstance(poisoned, EngineGenerateError)
    assert "/nowhere" in str(poisoned)
    assert client.is_running


async def test_contract_Q08_Q14_of_two_fatal_errors_the_first_is_kept(
    eventually: Eventually,
) -> None:
    """The model fails in the middle of a batch, and then the process ends."""
    with running(POISON_TAKER) as core:
        client = client_of(core)
        await client.setup()
        tasks = await under_way(client, "a", "b")
        poisoned = asyncio.create_task(read(client, "poisoned", prompt=POISONED))
        for end in await ends_of([*tasks, poisoned]):
            assert isinstance(end, MQEngineDeadError)
            assert "the model swallowed poison" in str(end)
        first = client._first_error
        assert first is not None
        await asyncio.to_thread(core.process.wait)
        client._set_errored(RuntimeError("later"))
        with pytest.raises(RuntimeError, match="swallowed poison") as caught:
            await client.check_health()
        assert caught.value is first is client.dead_error.__cause__
        assert not client.output_queues
        client.close()


async def test_contract_Q14_every_error_is_logged_with_its_traceback_and_the_first_is_kept(
    served: CoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(served)
    errors = [RuntimeError("first"), RuntimeError("second")]
    for error in errors:
        client._set_errored(error)
    told = [r.exc_info for r in caplog.records if r.name == "diptych_frontend.v0.mq_client"]
    assert [info[1] for info in told if info] == errors
    with pytest.raises(RuntimeError) as caught:
        await client.check_health()
    assert caught.value is errors[0]
    client.close()


# --- the client's own end ---------------------------------------------------------------------


async def test_contract_Q18_to_close_a_client_is_no_error(served: CoreProcess) -> None:
    client = client_of(served)
    await client.setup()
    client.close()
    assert (client.is_running, client.is_stopped, client.errored) == (True, False, False)


async def test_contract_Q20_closing_leaves_no_task_and_no_descriptor(
    served: CoreProcess, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    warm = client_of(served)
    await warm.setup()
    warm.close()
    await asyncio.sleep(0.05)
    tasks = len(asyncio.all_tasks())
    before = psutil.Process().num_fds()
    for _ in range(20):
        client = client_of(served)
        await client.setup()
        client.close()
        client.close()
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
    await eventually(lambda: psutil.Process().num_fds() <= before + 2)
    assert caplog.records == [], "its loops were cancelled, and did not fail"
    assert served.process.poll() is None, "the engine lives on"


def test_contract_Q20_a_program_that_forgets_to_close_ends(served: CoreProcess) -> None:
    """Whether its clients were set up or not."""
    script = f"""
import asyncio, gc
from engine_kit.mq import CONFIG
from diptych_engine import MQLLMEngineClient

async def main():
    for number in range(6):
        client = MQLLMEngineClient({served.endpoint!r}, CONFIG, {served.process.pid})
        if number % 2:
            await client.setup()
    del client
    gc.collect()

asyncio.run(main())
"""
    path = os.pathsep.join(sys.path)
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path})
    assert ended.returncode == 0
    assert served.process.poll() is None, "the engine lives on"
