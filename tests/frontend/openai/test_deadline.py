"""Time limits of the steps of one request."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import Deadline, Exchange

SHORT, LONG = 0.02, 30.0


async def take(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@pytest.mark.parametrize("before", [LONG, SHORT, SHORT / 4], ids=["longer", "equal", "shorter"])
async def test_a_step_is_bounded_whatever_the_limit_of_the_one_before(before: float) -> None:
    deadline = Deadline()
    assert await deadline.within(before, take(0)) == "done"
    with pytest.raises(TimeoutError):
        await deadline.within(SHORT, take(LONG))


async def test_the_time_between_two_steps_does_not_count() -> None:
    deadline = Deadline()
    for _ in range(3):
        assert await deadline.within(SHORT, take(0)) == "done"
        await asyncio.sleep(2 * SHORT)


async def test_time_goes_on_for_the_next_step_after_a_late_one() -> None:
    deadline = Deadline()
    with pytest.raises(TimeoutError):
        await deadline.within(SHORT, take(LONG))
    assert await deadline.within(LONG, take(2 * SHORT)) == "done"
    with pytest.raises(TimeoutError):
        await deadline.within(SHORT, take(LONG))


async def test_who_is_cancelled_by_others_is_not_told_of_a_timeout() -> None:
    waits_again = asyncio.Event()

    async def late_and_on() -> None:
        deadline = Deadline()
        with pytest.raises(TimeoutError):
            await deadline.within(SHORT, take(LONG))
        waits_again.set()
        await deadline.within(LONG, take(LONG))

    task = asyncio.create_task(late_and_on())
    await waits_again.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_rings_once_it_is_closed() -> None:
    deadline = Deadline()
    task = asyncio.current_task()
    assert task is not None
    await deadline.within(SHORT, take(0))
    deadline.close()
    await asyncio.sleep(2 * SHORT)
    assert task.cancelling() == 0


async def test_a_request_that_is_over_needs_no_garbage_collector() -> None:
    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    client = UntilDisconnect(receive, Exchange("r"))
    alive = weakref.ref(client)
    gc.disable()
    try:
        with client:
            await asyncio.sleep(0)
        del client
        await asyncio.sleep(0)
        assert alive() is None
    finally:
        gc.enable()
