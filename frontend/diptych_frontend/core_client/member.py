"""One engine core of a front-end: its process, the connection to it, and its health."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from diptych_frontend.core_client.client import UTILITY_TIMEOUT_S, CoreClient
from diptych_frontend.core_client.heartbeat_timer import Pulse, stood_still_s
from diptych_frontend.core_client.launcher import TERMINATE_GRACE_S, Core
from diptych_frontend.core_client.link import CoreLink
from diptych_protocol import (
    UNREADABLE,
    DiptychError,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    SchedulerStats,
)

PULSE_INTERVAL_S = 1.0
"""The time between an answer of the core and the next question. Probes and scrapers cause no
questions; they get what is known."""
TAKE_S = 0.1
"""How long to wait for outputs before checking that the core is alive."""


class CoreMember:
    """A core from the start of its process to its end."""

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
        self.link = CoreLink(core, on_outputs=self._take_outputs, on_dead=self._die)
        self.stats = SchedulerStats()
        self.open: dict[str, EngineCoreRequest] = {}
        """Its requests (internal ids) that have not ended, as they were first sent."""
        self.leaving = False
        """It gets no more requests."""
        self.dismissed = False
        """Its end is nobody's death."""
        self._empty = asyncio.Event()
        """Set, once somebody waits for it, when nothing is open."""
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._pulse = Pulse()
        self._look_due = math.inf
        self._questions: asyncio.Task[None] | None = None
        """Asks the core for its statistics again and again, which takes its pulse too."""

    async def connect(self, timeout_s: float) -> None:
        """Wait until the core has loaded its model; harmless if it has.

        Raises what `CoreLink.greet` raises.
        """
        self.description = await self.link.greet(timeout_s)
        if self._questions is None:
            self._questions = asyncio.create_task(self._keep_asking(), name="core pulse")

    def _die(self, cause: EngineDeadError) -> None:
        if not self.dismissed:
            self._on_death(cause)

    # --- messages -----------------------------------------------------------------------------

    @property
    def client(self) -> CoreClient:
        """The connection. Raises `EngineDeadError` before `connect`, `ClientClosedError` after
        `disconnect`."""
        return self.link.client

    def add(self, request: EngineCoreRequest) -> None:
        self.client.add(request)
        self.open.setdefault(request.request_id, request)  # a later piece is no request

    def _take_outputs(self, message: EngineCoreOutputs) -> None:
        if message.scheduler_stats is not None:
            self._take_stats(message.scheduler_stats)
        for output in message.outputs:
            if output.finish_reason is not None:
                self._close(output.request_id)
        self._on_outputs(message)

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
            self.link.take_outputs(min(left, TAKE_S))

    def disconnect(self) -> None:
        """Receive no more from the core. Safe to call twice, and without an event loop."""
        self.dismissed = True
        if self._questions is not None and not self._questions.get_loop().is_closed():
            self._questions.cancel()
        self.link.close()

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """End the process: ask it first, then kill it. Safe to call twice."""
        self.process.stop(timeout_s)
