"""Streams of pages: they cost nothing while nobody watches, and little however many do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from waits import PATIENCE_S

from diptych_protocol import EngineOverloadedError
from diptych_router.telling.page import routes
from diptych_router.telling.page.panels import EngineFigures, Panels, panels_of
from diptych_router.telling.page.routes import MOST_OF_ONE, MOST_WATCHERS, PULSE, Watchers


class View:
    """A router whose only engine has received so many blocks."""

    def __init__(self) -> None:
        self.blocks, self.looks = 1, 0
        self.failure: Exception | None = None

    def panels(self) -> Panels:
        self.looks += 1
        if self.failure is not None:
            raise self.failure
        engine = EngineFigures(
            id="d", name="d", role="decode", state="ok", blocks_received=self.blocks
        )
        return panels_of([engine], 0, 0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "LOOK_S", 0.001)


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def watched(view: View) -> Watchers:
    return Watchers(view.panels, lambda: False)


async def next_of(events: AsyncIterator[bytes]) -> int:
    """The blocks that the next event tells."""
    event = await asyncio.wait_for(anext(events), PATIENCE_S)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    told: Any = msgspec.json.decode(event.removeprefix(b"data: "))
    return int(told["engines"][0]["blocks_received"])


Eventually = Callable[..., Awaitable[Any]]


async def test_nobody_looks_while_nobody_watches(
    view: View, watched: Watchers, eventually: Eventually
) -> None:
    assert view.looks == 0
    async with watched.watching("alice") as events:
        assert await next_of(events) == 1
        await eventually(lambda: view.looks > 3)
    seen = view.looks
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert view.looks == seen
    assert len(watched) == 0


async def test_many_pages_cost_one_look(
    view: View, watched: Watchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "LOOK_S", 3600)
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(watched.watching(f"client {n}")) for n in range(10)
        ]
        assert [await next_of(events) for events in streams] == [1] * 10
        assert view.looks == 1


async def test_changes_are_told_and_a_slow_page_skips_some(
    view: View, watched: Watchers, eventually: Eventually
) -> None:
    async with watched.watching("alice") as events:
        assert await next_of(events) == 1
        for blocks in (2, 3, 4):
            view.blocks, seen = blocks, view.looks
            await eventually(lambda seen=seen: view.looks > seen + 1)
        assert await next_of(events) == 4


async def test_there_is_room_for_so_many_pages_and_for_those_of_others(watched: Watchers) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MOST_OF_ONE):
            await stack.enter_async_context(watched.watching("alice"))
        with pytest.raises(EngineOverloadedError, match="too many pages"):
            await stack.enter_async_context(watched.watching("alice"))
        for n in range(MOST_WATCHERS - MOST_OF_ONE):
            await stack.enter_async_context(watched.watching(f"client {n}"))
        with pytest.raises(EngineOverloadedError, match="too many pages"):
            await stack.enter_async_context(watched.watching("bob"))
    async with watched.watching("alice") as events:
        assert await next_of(events) == 1


async def test_a_quiet_stream_shows_that_it_lives(
    watched: Watchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "SILENCE_S", 0.0)
    async with watched.watching("alice") as events:
        # What comes first differs between releases of Python.
        assert PULSE in [await asyncio.wait_for(anext(events), PATIENCE_S) for _ in range(2)]


async def test_streams_end_when_the_router_leaves(view: View) -> None:
    leaving = False
    watched = Watchers(view.panels, lambda: leaving)
    async with watched.watching("alice") as events:
        await next_of(events)
        leaving = True
        assert [event async for event in events] == []


async def test_a_stream_ends_after_its_time(
    watched: Watchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "STREAM_S", 0.0)
    async with watched.watching("alice") as events:
        assert [event async for event in events] == []


async def test_a_look_that_fails_is_not_the_last(view: View, watched: Watchers) -> None:
    async with watched.watching("alice") as events:
        assert await next_of(events) == 1
        view.failure = EngineOverloadedError("busy")
        seen = view.looks
        while view.looks == seen:
            await asyncio.sleep(0.001)
        view.failure, view.blocks = None, 2
        assert await next_of(events) == 2
