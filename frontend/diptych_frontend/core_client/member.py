"""One engine core of a front-end: its process, the connection to it, the watch over both, and its
health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec

from diptych_frontend.core_client.client import UTILITY_TIMEOUT_S, CoreClient
from diptych_frontend.core_client.heartbeat_timer import Pulse, stood_still_s
from diptych_frontend.core_client.launcher import TERMINATE_GRACE_S, Core
from diptych_protocol import (
    UNREADABLE,
    ClientClosedError,
    DiptychError,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    SchedulerStats,
)

log = logging.getLogger(__name__)

PULSE_INTERVAL_S = 1.0
"""The time between an answer of the core and the next question. Probes and scrapers cause no
questions; they get what is known."""
TAKE_S = 0.1
"""How long to wait for outputs before checking that the core is alive."""
CAUSE_GRACE_S = 1.0
"""After a connection has ended, the process may end within this time too, and the reverse, before
the cause is reported."""
MAX_OUTPUTS_AT_ONCE = 128
"""A larger step is handled in pieces, so that the event loop can do other work in between."""


class CoreMember:
    """A core from the start of its process to its end. It is connected to at the first use, inside
    a running loop, and can be made without one."""

    description: EngineDescription

    def __init__(
        self,
        core: Core,
        rank: int,
        *,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        """`connect` waits until the core can serve.

        `on_death` may be called more than once, with the best known cause first.
        """
        self.rank = rank
        self.process = core
        self.stats = SchedulerStats()
        self.open: dict[str, EngineCoreRequest] = {}
        """Its requests (internal ids) that have not ended, as they were first sent."""
        self.leaving = False
        """It gets no more requests."""
        self.dismissed = False
        """Its end is nobody's death."""
        self.closed = False
        self._client: CoreClient | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[EngineDescription] | None = None
        self._backlog: deque[EngineCoreOutputs] = deque()
        self._line_ended = asyncio.Event()
        self._empty = asyncio.Event()
        """Set, once somebody waits for it, when nothing is open."""
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._pulse = Pulse()
        self._look_due = math.inf
        self._questions: asyncio.Task[None] | None = None
        """Asks the core for its statistics again and again, which takes its pulse too."""

    # --- the connection -----------------------------------------------------------------------

    @property
    def is_watched(self) -> bool:
        """Whether there is a connection, and somebody who notices the end of the process."""
        return self._client is not None

    @property
    def is_ready(self) -> bool:
        """Whether the core has described itself."""
        return self._greeting is not None and self._greeting.done() and not _failed(self._greeting)

    @property
    def client(self) -> CoreClient:
        """The connection. Raises `EngineDeadError` before there is one, and `ClientClosedError`
        after `disconnect`."""
        if self.closed:
            raise ClientClosedError(f"the client of {self.process.endpoint} was closed")
        if self._client is None:
            raise EngineDeadError("the engine is not started: await ready() first")
        return self._client

    def begin_to_connect(self) -> None:
        """Connect and begin to watch; harmless if that was done."""
        if self._client is not None or self.closed:
            return
        self._client = CoreClient(
            self.process.endpoint,
            self.process.keys,
            on_outputs=self._take,
            on_lost=self._connection_lost,
        )
        self._watcher = asyncio.create_task(self._watch(), name="core watcher")

    async def connect(self, timeout_s: float) -> None:
        """Wait until the core has loaded its model; harmless if it has. Several callers may wait
        together.

        Raises what `CoreClient.describe` raises, and `EngineDeadError` if the process ends.
        """
        self.begin_to_connect()
        client = self.client  # raises after `disconnect`, also to those who were greeted before
        if self._greeting is None or _failed(self._greeting):
            greeting = asyncio.create_task(self._greet(client, timeout_s), name="core greeting")
            greeting.add_done_callback(_mark_seen)
            self._greeting = greeting
        self.description = await asyncio.shield(self._greeting)
        if self._questions is None:
            self._questions = asyncio.create_task(self._keep_asking(), name="core pulse")

    async def _greet(self, client: CoreClient, timeout_s: float) -> EngineDescription:
        """A core that ends before it listens is nobody that a greeting could notice missing."""
        described = asyncio.create_task(client.describe(timeout_s))
        ended = asyncio.create_task(self.process.wait())
        try:
            await asyncio.wait((described, ended), return_when=asyncio.FIRST_COMPLETED)
            if not described.done():
                raise ended.result()
            self.process.unlink()
            return described.result()
        finally:
            described.cancel()
            ended.cancel()

    async def _watch(self) -> None:
        cause = await self.process.wait()
        if self.client.connected:  # what it said may still be on its way
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._line_ended.wait(), CAUSE_GRACE_S)
        why = self.client.hear_last_words()
        if why:
            cause = EngineDeadError(f"{cause}: {why}")
        self._die(cause)
        self.client.lost(cause)

    def _connection_lost(self, cause: EngineDeadError) -> None:
        """The connection ended; the process, if it ended too, knows better why."""
        self._line_ended.set()
        asyncio.get_running_loop().call_later(CAUSE_GRACE_S, self._die, cause)

    def _die(self, cause: EngineDeadError) -> None:
        if not self.dismissed:
            self._on_death(cause)

    # --- messages -----------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        self.client.add(request)
        self.open.setdefault(request.request_id, request)  # a later piece is no request

    def _take(self, message: EngineCoreOutputs) -> None:
        if not self._backlog and len(message.outputs) <= MAX_OUTPUTS_AT_ONCE:
            self._hand_over(message)
            return
        idle = not self._backlog
        self._backlog += _pieces(message)
        if idle:
            self._hand_over_next()

    def _hand_over_next(self) -> None:
        if not self._backlog:
            return  # closed in the meantime
        self._hand_over(self._backlog.popleft())
        if self._backlog:
            asyncio.get_running_loop().call_soon(self._hand_over_next)

    def _hand_over(self, message: EngineCoreOutputs) -> None:
        try:
            if message.scheduler_stats is not None:
                self._take_stats(message.scheduler_stats)
            for output in message.outputs:
                if output.finish_reason is not None:
                    self._close(output.request_id)
            self._on_outputs(message)
        except Exception as exc:
            log.exception("outputs of the core cannot be handled")
            self._die(EngineDeadError(f"the output handler failed: {exc!r}"))

    def abort(self, request_ids: list[str]) -> None:
        """Abort some of the open requests."""
        self.client.abort(request_ids)
        for request_id in request_ids:
            self._close(request_id)

    def _close(self, request_id: str) -> None:
        self.open.pop(request_id, None)
        if not self.open:
            self._empty.set()

    async def emptied(self) -> None:
        """Wait until no request is open."""
        while self.open:
            self._empty.clear()
            await self._empty.wait()

    async def refresh_stats(self, timeout_s: float = UTILITY_TIMEOUT_S) -> None:
        """Ask the core for its present statistics."""
        self._take_stats(await self.client.fetch_stats(timeout_s))

    def _take_stats(self, stats: SchedulerStats) -> None:
        self.stats = stats
        self._pulse.heard(stats)

    # --- is it well? --------------------------------------------------------------------------

    def doubtful_s(self) -> float:
        """For how many seconds the core has shown no progress, although it was asked."""
        return self._pulse.doubtful_s(self._look())

    def _look(self) -> float:
        """Now; seconds in which this process stood still, perhaps paused with its core, are not
        held against the core from here on."""
        now = time.monotonic()
        self._pulse.excuse_seconds(stood_still_s(self._look_due, now), now)
        self._look_due = now + PULSE_INTERVAL_S
        return now

    async def _keep_asking(self) -> None:
        """Until cancelled. An answer may take as long as the core's longest step."""
        question: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(PULSE_INTERVAL_S)
                now = self._look()
                if question is None or question.done():
                    self._pulse.asked(now)
                    question = asyncio.create_task(self._ask())
        finally:
            if question is not None:
                question.cancel()

    async def _ask(self) -> None:
        with contextlib.suppress(TimeoutError, ValueError, DiptychError, *UNREADABLE):
            await self.refresh_stats()

    def excuse_silence(self) -> None:
        """Record that there was a reason for the silence so far."""
        self._pulse.excuse()

    # --- the end ------------------------------------------------------------------------------

    def finish_requests(self, deadline: float) -> None:
        """Take outputs until no request is open, or until `deadline` (monotonic). It blocks the
        running event loop."""
        while self.open and self.process.ended() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.client.take_outputs(min(left, TAKE_S))
            while self._backlog:
                self._hand_over(self._backlog.popleft())

    def disconnect(self) -> None:
        """Receive no more from the core. Safe to call twice, and without an event loop."""
        self.dismissed = self.closed = True
        self._backlog.clear()
        for task in (self._questions, self._watcher):
            if task is not None and not task.get_loop().is_closed():
                task.cancel()
        if self._client is not None:
            self._client.close()  # which ends the greeting too

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """End the process: ask it first, then kill it. Safe to call twice."""
        self.process.stop(timeout_s)


def _pieces(message: EngineCoreOutputs) -> list[EngineCoreOutputs]:
    """The message in parts of bounded size; all but its outputs comes with the first."""
    outputs = message.outputs
    first = msgspec.structs.replace(message, outputs=outputs[:MAX_OUTPUTS_AT_ONCE])
    return [first] + [
        EngineCoreOutputs(
            message.engine_index,
            outputs[at : at + MAX_OUTPUTS_AT_ONCE],
            timestamp=message.timestamp,
        )
        for at in range(MAX_OUTPUTS_AT_ONCE, len(outputs), MAX_OUTPUTS_AT_ONCE)
    ]


def _failed(greeting: asyncio.Task[EngineDescription]) -> bool:
    return greeting.done() and (greeting.cancelled() or greeting.exception() is not None)


def _mark_seen(greeting: asyncio.Task[EngineDescription]) -> None:
    """Those who waited for it may all have left: then its failure is nobody's."""
    if not greeting.cancelled():
        greeting.exception()
