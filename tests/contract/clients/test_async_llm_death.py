"""How an AsyncLLM lives and dies: rows A5 and A10, and C1 to C4 of every client."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass

import psutil
import pytest
import pytest_asyncio
from engine_kit.async_llm import ARGS, ENDLESS, final, params, until
from engine_kit.core import DUMMY
from waits import PATIENCE_S

from diptych_engine import AsyncLLM
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_protocol import (
    ClientClosedError,
    EngineDeadError,
    RequestOutput,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Killed:
    """An engine whose core was killed under fifty requests."""

    engine: AsyncLLM
    states: list[tuple[bool, bool, bool]]
    """(is_running, is_stopped, errored): new, at work, killed."""
    ends: list[RequestOutput | BaseException]


def state(engine: AsyncLLM) -> tuple[bool, bool, bool]:
    return engine.is_running, engine.is_stopped, engine.errored


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def killed() -> AsyncIterator[Killed]:
    made: list[AsyncLLM] = []
    maker = threading.Thread(
        target=lambda: made.append(AsyncLLM.from_vllm_config(ARGS.create_engine_config()))
    )
    maker.start()
    maker.join()  # an engine outlives the thread that made it
    [engine] = made
    states = [state(engine)]
    open_requests = [
        asyncio.create_task(final(engine, str(i), max_tokens=ENDLESS)) for i in range(50)
    ]
    await until(lambda: len(engine.output_processor.answers) == 50)
    states.append(state(engine))
    os.kill(engine.description.pid, signal.SIGKILL)
    await until(lambda: engine.errored)
    states.append(state(engine))
    yield Killed(engine, states, await asyncio.gather(*open_requests, return_exceptions=True))
    engine.shutdown()


async def test_contract_A05_a_death_reaches_everybody_who_waits(killed: Killed) -> None:
    assert len(killed.ends) == 50
    assert all(isinstance(end, EngineDeadError) for end in killed.ends)
    with pytest.raises(EngineDeadError):
        await killed.engine.add_request("late", [1], params())


async def test_contract_C01_it_runs_before_its_first_request_and_until_it_dies(
    killed: Killed,
) -> None:
    assert [is_running for is_running, _, _ in killed.states] == [True, True, False]


async def test_contract_C02_stopped_is_errored(killed: Killed) -> None:
    assert all(is_stopped == errored for _, is_stopped, errored in killed.states)


@pytest.mark.parametrize("call", ["reset_prefix_cache", "is_sleeping", "list_loras"])
async def test_contract_C04_a_control_call_raises_the_cause(killed: Killed, call: str) -> None:
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        await getattr(killed.engine, call)()


async def test_contract_C03_a_killed_core_is_noticed_without_a_call(killed: Killed) -> None:
    assert [errored for _, _, errored in killed.states] == [False, False, True]


async def test_contract_C04_the_dead_error_names_the_cause(killed: Killed) -> None:
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            raise killed.engine.dead_error
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        await killed.engine.check_health()


async def test_contract_C04_the_first_cause_is_the_one_that_is_told(killed: Killed) -> None:
    """A core that was killed also loses its connection, and what comes later explains nothing."""
    killed.engine._die(EngineDeadError("the connection was lost"))
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        raise killed.engine.dead_error


async def test_contract_C02_an_engine_that_was_shut_down_is_stopped() -> None:
    engine = AsyncLLM(ARGS.create_engine_config())
    await final(engine, "one")
    engine.shutdown()
    assert state(engine) == (False, True, True)


async def test_contract_C02_after_its_end_an_engine_is_stopped_for_good(killed: Killed) -> None:
    killed.engine.shutdown()
    assert state(killed.engine) == (False, True, True)
    with pytest.raises(ClientClosedError):
        await anext(killed.engine.generate([1], params(), "after the end"))


async def test_contract_A05_a_dropped_client_takes_its_core_with_it() -> None:
    engine = AsyncLLM(ARGS.create_engine_config())
    engine._run_output_handler()
    pid = core_pid(engine)
    await asyncio.sleep(0)  # the watcher is on its way
    client = weakref.ref(engine)
    gc.disable()  # no help: nothing may hold it
    try:
        del engine
        assert client() is None
    finally:
        gc.enable()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_contract_C03_a_core_that_dies_before_the_first_request_is_seen() -> None:
    engine = AsyncLLM(ARGS.create_engine_config())
    os.kill(core_pid(engine), signal.SIGKILL)
    await until(lambda: engine.errored)
    assert (engine.is_running, engine.is_stopped) == (False, True)
    assert isinstance(engine.dead_error, EngineDeadError)
    assert "killed by signal 9" in str(engine.dead_error)
    with pytest.raises(EngineDeadError):
        await final(engine)
    engine.shutdown()


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("os.kill(os.getpid(), 9)", -9)], ids=["ends", "is killed"]
)
async def test_contract_A10_a_program_that_ends_without_a_shutdown_leaves_no_core(
    end: str, code: int
) -> None:
    script = f"""
        import asyncio, os
        from diptych_engine import AsyncLLM, EngineArgs
        from diptych_protocol import SamplingParams

        engine = AsyncLLM.from_engine_args(EngineArgs({DUMMY!r}, num_blocks=8, num_threads=1))

        async def main():
            async for output in engine.generate([1], SamplingParams(max_tokens=2), "r"):
                pass
            print(engine.description.pid, flush=True)

        asyncio.run(main())
        {end}
    """
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    await until(lambda: has_ended(int(run.stdout)))


def has_ended(pid: int) -> bool:
    """Whether or not somebody has buried it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def core_pid(engine: AsyncLLM) -> int:
    [member] = engine._cores.members
    assert isinstance(member.process, CoreProcess)
    return member.process.process.pid
