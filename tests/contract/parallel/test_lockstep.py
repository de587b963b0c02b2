"""Two cores that step together: an idle one runs empty steps beside a busy one; then both sleep."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from waits import PATIENCE_S

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    SamplingParams,
    SchedulerStats,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(
    model="dummy://?num_hidden_layers=2",
    engine_id="pod",
    num_blocks=256,
    num_threads=1,
    max_num_batched_tokens=64,
    data_parallel_size=2,
    data_parallel_lockstep=True,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(CONFIG)
    yield engine
    engine.shutdown()


async def read(engine: AsyncLLM, name: str, length: int, rank: int | None = None) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    tokens: list[int] = []
    async for output in engine.generate([1, 2, 3], params, name, data_parallel_rank=rank):
        tokens = output.outputs[0].token_ids
    return tokens


async def stats(engine: AsyncLLM) -> list[SchedulerStats]:
    await engine.refresh_stats()
    return list(engine.stats_by_engine().values())


async def until(engine: AsyncLLM, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await engine.refresh_stats()


async def at_rest(engine: AsyncLLM) -> int:
    """Wait for the end of a wave; the number of the next one."""
    coordinator = engine._cores._coordinator
    assert coordinator is not None
    await until(engine, lambda: not coordinator.running)
    return coordinator.wave


@pytest.mark.parametrize("busy", [0, 1])
async def test_contract_L05_the_other_core_keeps_stepping_and_then_both_stop(
    engine: AsyncLLM, busy: int
) -> None:
    wave = await at_rest(engine)
    before = [core.dummy_steps for core in await stats(engine)]
    assert len(await read(engine, "alone", 60, rank=busy)) == 60
    assert await at_rest(engine) == wave + 1
    after = [core.dummy_steps for core in await stats(engine)]
    assert after[1 - busy] - before[1 - busy] >= 59, "a dummy batch for every step"
    assert after[busy] - before[busy] <= 16
    assert [core.dummy_steps for core in await stats(engine)] == after, "nobody steps any more"


async def test_contract_B13_requests_of_every_moment_are_served(engine: AsyncLLM) -> None:
    """They come while waves begin, run and end."""
    expected = await read(engine, "first", 40)
    wave = await at_rest(engine)

    async def caller(number: int) -> None:
        for turn in range(6):
            answer = await read(engine, f"{number}-{turn}", 1 + (number * 7 + turn * 13) % 40)
            assert answer == expected[: len(answer)]

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(caller(number) for number in range(5)))
        assert await at_rest(engine) > wave


async def test_contract_B13_a_pause_holds_for_all_cores_and_ends_for_all(engine: AsyncLLM) -> None:
    running = asyncio.create_task(read(engine, "kept", 200, rank=1))
    await until(engine, lambda: engine._cores.members[1].stats.tokens_generated > 0)
    async with asyncio.timeout(PATIENCE_S):
        await engine.pause_generation(mode="keep")
        late = asyncio.create_task(read(engine, "late", 5, rank=0))
        frozen = [(core.steps, core.dummy_steps) for core in await stats(engine)]
        await engine.sleep(1, mode="keep")
        assert [(core.steps, core.dummy_steps) for core in await stats(engine)] == frozen
        assert not late.done()
        await engine.wake_up()
        assert len(await late) == 5
        assert len(await running) == 200
        await at_rest(engine)


async def test_contract_C23_cores_in_lockstep_keep_their_number(engine: AsyncLLM) -> None:
    with pytest.raises(InvalidRequestError, match="step together"):
        await engine.scale_elastic_ep(3)


async def test_the_death_of_one_core_is_not_waited_for() -> None:
    doomed = await AsyncLLM.start(CONFIG)
    try:
        running = asyncio.create_task(read(doomed, "unfinished", 200, rank=0))
        await until(doomed, lambda: doomed._cores.members[0].stats.tokens_generated > 0)
        os.kill(doomed._cores.members[1].description.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineDeadError):
                await running
            await doomed.died()
        assert doomed.errored
    finally:
        doomed.shutdown()
