"""Pages that watch the pools. One look serves all of them; without pages there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

from diptych_frontend.openai.responses import SSE, encode
from diptych_protocol import EngineOverloadedError
from diptych_router.telling.page.panels import Panels, change

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
MOST_WATCHERS: Final = 64
"""The most streams of one process, for all clients together."""
MOST_OF_ONE: Final = 16
"""The most streams of one client: of one API key or, without keys, of one address."""
STREAM_S: Final = 3600.0
"""A stream ends after this long; an open page requests the next one."""
SILENCE_S: Final = 15.0
"""After this long without news, a meaningless line shows that the stream is alive."""
PULSE: Final = b": \n\n"


class Watchers:
    """The open streams of this process."""

    def __init__(self, look: Callable[[], Panels], leaving: Callable[[], bool]) -> None:
        """look: returns the present state of both pools. leaving: whether the router is about to
        end; streams then end first."""
        self._look_now = look
        self._leaving = leaving
        self._clients: list[str] = []
        """Whose streams are open."""
        self._newest: Panels | None = None
        self._looked = asyncio.Event()
        """Set, and replaced by a new one, after each look."""
        self._looking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._clients)

    @contextlib.asynccontextmanager
    async def watching(self, client: str) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Yield the events for one more page, as server-sent events. Raises `EngineOverloadedError`
        if too many pages watch."""
        if len(self) >= MOST_WATCHERS or self._clients.count(client) >= MOST_OF_ONE:
            raise EngineOverloadedError("too many pages watch this router; close one of them")
        self._clients.append(client)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            yield self._events()
        finally:
            self._clients.remove(client)
            if not self._clients and self._looking is not None:
                self._looking.cancel()
                self._looking = self._newest = None

    async def _events(self) -> AsyncGenerator[bytes]:
        """A page that reads slowly skips looks: it is told the difference to what it knows."""
        loop = asyncio.get_running_loop()
        until, silent_since = loop.time() + STREAM_S, loop.time()
        known: Panels | None = None
        while loop.time() < until and not self._leaving():
            now = self._newest
            news = change(known, now) if now is not None else None
            looked = self._looked
            if news is not None:
                known, silent_since = now, loop.time()
                yield SSE % encode(news)
            elif loop.time() - silent_since >= SILENCE_S:
                silent_since = loop.time()
                yield PULSE
            if looked is self._looked:
                await looked.wait()

    async def _look(self) -> None:
        """Again and again, until the last page has gone."""
        while True:
            try:
                self._newest = self._look_now()
            except Exception:  # the next look may be luckier
                log.exception("the pools cannot be shown")
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(LOOK_S)
