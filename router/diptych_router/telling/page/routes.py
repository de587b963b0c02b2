"""The routes of the page: its files, its view of the pools, and explanations of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import exchange_of
from diptych_frontend.openai.responses import SSE, encode, json_response
from diptych_frontend.timeline.lanes import Timeline, timeline
from diptych_protocol import EngineOverloadedError, InvalidRequestError
from diptych_protocol.admin import Explanation
from diptych_router.telling.page.assets import Assets
from diptych_router.telling.page.control import Control
from diptych_router.telling.page.panels import Panels, change, whose

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
    """The open streams of this process. It is their ASGI endpoint."""

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        async with self.watching(exchange.client) as events:
            exchange.is_event_stream = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            with UntilDisconnect(receive, exchange):
                async with aclosing(events):
                    async for event in events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

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


UNKEPT: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
"""Headers of an answer for one client at one moment, which nobody may cache."""
ABOUT_PATH: Final = "/ui/api/about"
EVENTS_PATH: Final = "/ui/api/events"
ANSWER_PATH: Final = "/ui/api/answers/{request_id:path}"
TIMELINE_PATH: Final = "/ui/api/timelines/{request_id:path}"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The first data that a page requests."""

    model: str
    images: bool
    """Whether the model, and so its engines, take images."""
    version: str
    control: Control | None
    """Where engines can be killed; None if nowhere."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer was where, until now or to its end."""

    whose: str
    """Its name among the holders of blocks."""
    engine: str
    """The engine that had it last; empty: none yet."""
    outcome: str
    """Empty if it has not ended."""
    timeline: Timeline


class Page:
    """The page of one router."""

    def __init__(
        self,
        look: Callable[[], Panels],
        explained: Callable[[str, str], Explanation],
        *,
        model: str,
        images: Callable[[], bool],
        leaving: Callable[[], bool],
        control: Control | None,
    ) -> None:
        """look, leaving: see `Watchers`. explained: what is known of (request id, tenant)."""
        self._explained = explained
        self._model, self._images, self._control = model, images, control
        self._assets = Assets(control.url if control is not None else "")
        self.watchers = Watchers(look, leaving)

    @property
    def open_paths(self) -> frozenset[str]:
        """Paths that need no key."""
        return frozenset(self._assets.by_path)

    def routes(self) -> list[BaseRoute]:
        """The routes. All but files need a key, if the API does."""
        events = Route(EVENTS_PATH, self.watchers)
        events.methods = {"GET"}  # without HEAD: a stream would be sent to nobody
        return [
            *(Route(path, self._assets.answer) for path in self._assets.by_path),
            Route(ABOUT_PATH, self.about),
            events,
            Route(ANSWER_PATH, self.answer),
            Route(TIMELINE_PATH, self.timeline),
        ]

    async def about(self, request: Request) -> Response:
        about = About(
            model=self._model,
            images=self._images(),
            version=version("diptych"),
            control=self._control,
        )
        return json_response(about, headers=UNKEPT)

    async def answer(self, request: Request) -> Response:
        """Explain why the engines of an answer were chosen, and what came true. Only the caller's
        own requests are found, and the answer does not reveal whether there are others."""
        own = self._own(request)
        if not own.requests:
            raise InvalidRequestError(
                "this router remembers no such request of yours",
                param="request_id",
                status=404,
                code="not_found",
            )
        return json_response(own, headers=UNKEPT)

    async def timeline(self, request: Request) -> Response:
        """Return the timeline of the caller's own request, which may still be under way. None: it
        has not been heard of, as a page that chose the id itself may find."""
        found = self._own(request).requests
        course = None
        if found:
            newest = found[0]
            course = Course(
                whose=whose(newest.core_id),
                engine=newest.placements[-1].engine if newest.placements else "",
                outcome=newest.outcome,
                timeline=timeline(newest),
            )
        return json_response(course, headers=UNKEPT)

    def _own(self, request: Request) -> Explanation:
        """What is remembered of the caller under the path's id. Raises `InvalidRequestError`."""
        tenant = exchange_of(request.scope).tenant
        return self._explained(request.path_params["request_id"], tenant)
