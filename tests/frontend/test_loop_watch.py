"""What the event loop's lag is, and who is named for it."""

from __future__ import annotations

import asyncio
import time

import pytest

from diptych_frontend.observability.loop_watch import LONG_S, TICK_S, LoopWatch


async def hold_the_loop() -> None:
    time.sleep(LONG_S + 5 * TICK_S)


async def test_who_holds_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    lags: list[float] = []
    with LoopWatch(lags.append) as watch:
        await asyncio.sleep(TICK_S)
        watch.tick()
        task = asyncio.create_task(hold_the_loop(), name="request 4711")
        await task
        watch.tick()
    assert lags[1] > LONG_S
    lines = [record.getMessage() for record in caplog.records]
    assert any("request 4711, in " in line and "hold_the_loop" in line for line in lines)


async def test_a_loop_on_time_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    lags: list[float] = []
    with LoopWatch(lags.append) as watch:
        watch.tick()
        watch.tick()
    assert lags == [0.0, 0.0]
    assert not caplog.records
