"""The queue of services: each key once, one worker a key, failures come back later."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from waits import PATIENCE_S

from diptych_operator.kube import work_queue
from diptych_operator.kube.work_queue import WorkQueue

Work = Callable[[str], Awaitable[float | None]]


@asynccontextmanager
async def running(work: Work, concurrency: int = 2) -> AsyncIterator[WorkQueue[str]]:
    queue: WorkQueue[str] = WorkQueue(work, concurrency=concurrency, batch_s=0.01)
    task = asyncio.create_task(queue.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_many_events_of_a_key_are_one_pass() -> None:
    done = asyncio.Event()
    seen: Counter[str] = Counter()

    async def work(key: str) -> None:
        seen[key] += 1
        if seen["b"]:
            done.set()

    async with running(work, concurrency=1) as queue:
        for _ in range(100):
            queue.add("a")
        queue.add("b")
        await done.wait()
    assert seen == {"a": 1, "b": 1}


async def test_a_key_is_never_worked_on_twice_at_once_and_not_forgotten_either() -> None:
    busy, passes = 0, 0
    entered, finished = asyncio.Event(), asyncio.Event()

    async def work(key: str) -> None:
        nonlocal busy, passes
        busy += 1
        assert busy == 1
        entered.set()
        await asyncio.sleep(0.05)
        busy -= 1
        passes += 1
        if passes == 2:
            finished.set()

    async with running(work) as queue:
        queue.add("a")
        await entered.wait()
        queue.add("a")  # while it is being worked on
        await finished.wait()
    assert passes == 2


async def test_no_more_keys_at_once_than_allowed_and_all_in_the_end() -> None:
    busy, most, seen = 0, 0, set[str]()
    everything = asyncio.Event()

    async def work(key: str) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.01)
        busy -= 1
        seen.add(key)
        if len(seen) == 20:
            everything.set()

    async with running(work, concurrency=3) as queue:
        for number in range(20):
            queue.add(str(number))
        await everything.wait()
    assert most == 3


async def test_a_key_comes_back_when_it_asked_to() -> None:
    passes = 0
    third = asyncio.Event()

    async def work(key: str) -> float | None:
        nonlocal passes
        passes += 1
        if passes == 3:
            third.set()
            return None
        return 0.02

    async with running(work) as queue:
        queue.add("a")
        await third.wait()
        await asyncio.sleep(0.1)
    assert passes == 3


async def test_a_failure_comes_back_and_hurts_no_other_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(work_queue, "BACKOFF_S", (0.01, 0.02))
    seen: Counter[str] = Counter()
    done = asyncio.Event()

    async def work(key: str) -> None:
        seen[key] += 1
        if key == "bad" and seen[key] < 4:
            raise RuntimeError("not yet")
        if seen["bad"] == 4 and seen["good"]:
            done.set()

    async with running(work, concurrency=1) as queue:
        queue.add("bad")
        queue.add("good")
        await done.wait()
    assert seen == {"bad": 4, "good": 1}
    assert caplog.text.count("bad: failed, once more") == 3


async def test_an_earlier_date_wins() -> None:
    done = asyncio.Event()

    async def work(key: str) -> None:
        done.set()

    async with running(work) as queue:
        queue.add("a", 3600)
        queue.add("a", 0.01)
        queue.add("a", 3600)
        await done.wait()


async def test_the_backlog_is_what_waits_for_a_worker() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def work(key: str) -> None:
        entered.set()
        await release.wait()

    async with running(work, concurrency=1) as queue:
        queue.add("busy", 0)
        await entered.wait()
        queue.add("waits", 0)
        queue.add("tomorrow", 3600)
        assert queue.backlog() == 1
        release.set()
        while queue.backlog():
            await asyncio.sleep(0.001)
