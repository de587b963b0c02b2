"""However a consumer leaves, and whatever goes wrong, nothing is left behind: row B3.

And a consumer that lags misses nothing: row B4.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from engine_kit.core import DUMMY
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.client import CoreClient
from diptych_protocol import (
    EngineConfig,
    EngineCoreRequest,
    EngineDeadError,
    EngineGenerateError,
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
    StreamingInput,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(DUMMY, num_blocks=32, num_threads=1, max_num_seqs=3)
Eventually = Callable[..., Awaitable[Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(CONFIG)
    yield engine
    engine.shutdown()


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **changes})


async def nothing_left(engine: AsyncLLM) -> bool:
    stats = await engine.refresh_stats()
    open_here = len(engine.output_processor.answers) or engine._told
    busy = stats.num_running or stats.num_waiting or stats.num_waiting_for_input
    return stats.blocks_free == stats.blocks_total and not (open_here or busy)


async def consume(engine: AsyncLLM, kind: str, leave_after: int) -> None:
    """Read a request of some kind, and leave after so many outputs."""

    async def pieces() -> AsyncIterator[StreamingInput]:
        for token in range(1, 5):
            yield StreamingInput([token] * 3)

    prompt: Any = [1, 2, 3]
    params = sampling()
    match kind:
        case "several":
            params = sampling(n=3, temperature=1.0, output_kind=RequestOutputKind.DELTA)
        case "final":
            params = sampling(n=2, temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY)
        case "pieces":
            prompt, params = pieces(), sampling(max_tokens=2)
    async with aclosing(engine.generate(prompt, params, "same-name")) as outputs:
        seen = 0
        async for _ in outputs:
            seen += 1
            if seen == leave_after:
                break


KINDS = st.sampled_from(["one", "several", "final", "pieces"])
TURNS = st.integers(0, 30)
"""Turns of the event loop until a request is cancelled."""


@settings(max_examples=25)
@given(st.lists(st.tuples(KINDS, st.integers(1, 12), TURNS | st.none()), min_size=1, max_size=6))
async def test_contract_B03_blocks_return_wherever_a_request_is_cancelled(
    engine: AsyncLLM, eventually: Eventually, readers: list[tuple[str, int, int | None]]
) -> None:
    tasks = []
    for kind, leave_after, turns in readers:
        task = asyncio.create_task(consume(engine, kind, leave_after))
        tasks.append(task)
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        if turns is not None:
            task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result, (_, _, turns) in zip(results, readers, strict=True):
        assert result is None or (
            turns is not None and isinstance(result, asyncio.CancelledError)
        ), result
    await eventually(lambda: nothing_left(engine))


async def test_contract_B03_a_cancelled_consumer_stays_cancelled(
    engine: AsyncLLM, eventually: Eventually
) -> None:
    answered = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate([1, 2, 3], sampling(max_tokens=400), "r"):
            answered.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(answered.wait(), PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: nothing_left(engine))


@pytest.mark.parametrize(
    ("prompt", "params"), [([], sampling()), ([1], sampling(temperature=-1)), ([64], sampling())]
)
async def test_contract_B03_a_validation_error_comes_unchanged(
    engine: AsyncLLM, prompt: list[int], params: SamplingParams
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        async for _ in engine.generate(prompt, params, "r"):
            pass
    assert refused.value.__cause__ is None
    assert await nothing_left(engine)


async def test_contract_B03_an_unexpected_error_aborts_and_names_its_cause(
    engine: AsyncLLM, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request can be made, but not sent."""

    def fail(*_: object) -> None:
        raise OverflowError("of something")

    monkeypatch.setattr(CoreClient, "add", fail)
    with pytest.raises(EngineGenerateError, match="OverflowError") as failed:
        async for _ in engine.generate([1], sampling(), "r"):
            pass
    assert isinstance(failed.value.__cause__, OverflowError)
    await eventually(lambda: nothing_left(engine))


@pytest.mark.parametrize("n", [1, 3])
async def test_contract_B04_a_slow_consumer_gets_every_token_in_fewer_messages(
    engine: AsyncLLM, eventually: Eventually, n: int
) -> None:
    async def tokens_of(kind: RequestOutputKind, *, slow: bool) -> tuple[list[list[int]], int]:
        tokens: list[list[int]] = [[] for _ in range(n)]
        messages = 0
        params = sampling(n=n, seed=7, temperature=1.0, output_kind=kind)
        async for output in engine.generate([1, 2, 3], params, "r"):
            messages += 1
            for answer in output.outputs:
                if kind is RequestOutputKind.DELTA:
                    tokens[answer.index] += answer.token_ids
                else:
                    tokens[answer.index] = answer.token_ids
            if slow:  # until there is nothing more to come
                await eventually(lambda: len(engine.output_processor.answers) == 0)
        return tokens, messages

    expected, _ = await tokens_of(RequestOutputKind.DELTA, slow=False)
    assert [len(tokens) for tokens in expected] == [40] * n
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        tokens, messages = await tokens_of(kind, slow=True)
        assert tokens == expected
        assert messages == 2, "the first one, and one with all the others"


async def test_contract_B03_a_dead_engine_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = await AsyncLLM.start(CONFIG)
    told: list[EngineCoreRequest] = []
    try:
        readers = [asyncio.create_task(consume(engine, "one", 1000)) for _ in range(3)]
        await asyncio.sleep(0)
        monkeypatch.setattr(engine._cores, "abort", told.append)
        os.kill(engine.description.pid, signal.SIGKILL)
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        assert told == []
        assert len(engine.output_processor.answers) == 0
    finally:
        engine.shutdown()
