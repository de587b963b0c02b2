"""Reads the figures of a service from its router: once a second while they change, else not at all.

The stream of events of the router's page reports changes. Without events nothing is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import httpx

from diptych.board.figures import Figures, Pace, pace, read_figures
from diptych.laptop.rundir import RunState, options

PERIOD_S = 1.0
TIMEOUT_S = 2.0
"""Time limit of one request for the figures."""
SILENCE_S = 60.0
"""The stream has a line every 15 s. After this silence it is opened again."""
RETRY_S = 5.0
"""The pause after a router did not answer, or serves no page."""

Tell = Callable[[Figures, Pace], None]


async def watch(state: RunState, tell: Tell) -> None:
    """Pass on the newest figures again and again, until cancelled."""
    base = state.url.removesuffix("/v1")
    news = asyncio.Event()
    timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_S)
    async with httpx.AsyncClient(base_url=base, timeout=timeout, **options(state)) as client:
        ringing = asyncio.create_task(_ring(client, news))
        try:
            await _look(client, news, tell)
        finally:
            ringing.cancel()
            await asyncio.wait((ringing,))


async def _look(client: httpx.AsyncClient, news: asyncio.Event, tell: Tell) -> None:
    before, before_at, rates = Figures(), 0.0, Pace()
    while True:
        news.clear()
        now, now_at = await _figures(client), time.monotonic()
        if now is None:
            await asyncio.sleep(RETRY_S)
            continue
        rates = pace(before, now, now_at - before_at, rates)
        tell(now, rates)
        idle = now == before
        before, before_at = now, now_at
        if idle:
            # The look before this one was a second ago, so rates are zero, and remain so.
            await news.wait()
            before_at = time.monotonic() - PERIOD_S
        else:
            await asyncio.sleep(PERIOD_S)


async def _figures(client: httpx.AsyncClient) -> Figures | None:
    """None if the router does not answer: it may be starting again."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            response = await client.get("/metrics")
        response.raise_for_status()
        return read_figures(response.text)
    except (httpx.HTTPError, TimeoutError, ValueError):
        return None


async def _ring(client: httpx.AsyncClient, news: asyncio.Event) -> None:
    """Set `news` at each event of the router's stream, until cancelled."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("GET", "/ui/api/events") as response:
                if response.status_code == httpx.codes.OK:
                    async for line in response.aiter_lines():
                        if line.startswith("data:"):
                            news.set()
        news.set()
        await asyncio.sleep(RETRY_S)
