"""One engine core of a front-end: its process, the connection to it, and how it fares."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from diptych_frontend.core_client import UTILITY_TIMEOUT_S, CoreClient
from diptych_frontend.core_launcher import TERMINATE_GRACE_S, CoreProcess
from diptych_frontend.pulse import Pulse
from diptych_protocol import (
    DiptychError,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    SchedulerStats,
)

CAUSE_GRACE_S = 0.2
PROBE_WAIT_S = 0.5
"""A probe waits this long for the core, and otherwise goes by what is known."""


class CoreMember:
    """A core of our own, from the start of its process to its end."""

    description: EngineDescription

    def __init__(
        self,
        config: EngineConfig,
        public_endpoint: str | None,
        keys_dir: Path | None,
        *,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        """Start the process; `connect` waits until it can serve.

        `on_death` may be called more than once, with the best known cause first.
        """
        self.rank = config.data_parallel_rank
        self.process = CoreProcess(config, public_endpoint, keys_dir)
        self.stats = SchedulerStats()
        self.open: dict[str, EngineCoreRequest] = {}
        """Its requests (internal ids) that have not ended."""
        self.leaving = False
        """It gets no more requests, and its end will be nobody's death."""
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._client: CoreClient | None = None
        self._watcher: asyncio.Task[EngineDeadError] | None = None
        self._pulse = Pulse()
        self._question: asyncio.Task[None] | None = None
        """Statistics that the core was asked for, to take its pulse."""

    async def connect(self, timeout_s: float) -> None:
        """Wait until the core has loaded its model.

        Raises `EngineDeadError` if it ends instead, `TimeoutError` if it takes too long.
        """
        if self._client is None or self._watcher is None:
            self._client = CoreClient(
                self.process.endpoint, None, on_outputs=self._take_outputs, on_lost=self._lose
            )
            self._watcher = asyncio.create_task(self._watch(), name="core watcher")
        self.description = await _unless_dead(self._client.describe(timeout_s), self._watcher)
        self.process.unlink()

    def _lose(self, cause: EngineDeadError) -> None:
        """The connection ended; the process, if it ended too, knows better why."""
        asyncio.get_running_loop().call_later(CAUSE_GRACE_S, self._die, cause)

    async def _watch(self) -> EngineDeadError:
        cause = await self.process.wait()
        self._die(cause)
        if self._client is not None:
            self._client.lost(cause)
        return cause

    def _die(self, cause: EngineDeadError) -> None:
        if not self.leaving:
            self._on_death(cause)

    # --- messages -----------------------------------------------------------------------------

    @property
    def client(self) -> CoreClient:
        """Raises `EngineDeadError` before `connect`."""
        if self._client is None:
            raise EngineDeadError("the engine is not started: await ready() first")
        return self._client

    def add(self, request: EngineCoreRequest) -> None:
        self.client.add(request)
        self.open[request.request_id] = request

    def _take_outputs(self, message: EngineCoreOutputs) -> None:
        if message.scheduler_stats is not None:
            self._take_stats(message.scheduler_stats)
        for output in message.outputs:
            if output.finish_reason is not None:
                self.open.pop(output.request_id, None)
        self._on_outputs(message)

    async def refresh_stats(self, timeout_s: float = UTILITY_TIMEOUT_S) -> None:
        """Ask the core for its statistics now."""
        self._take_stats(await self.client.fetch_stats(timeout_s))

    def _take_stats(self, stats: SchedulerStats) -> None:
        self.stats = stats
        self._pulse.heard(stats)

    # --- is it well? --------------------------------------------------------------------------

    async def doubtful_s(self) -> float:
        """Put a question to the core; for how many seconds it gave no proof of progress."""
        if self._question is None or self._question.done():
            self._pulse.asked(time.monotonic())
            self._question = asyncio.create_task(self._ask(), name="core pulse")
        await asyncio.wait((self._question,), timeout=PROBE_WAIT_S)
        return self._pulse.doubtful_s(time.monotonic())

    async def _ask(self) -> None:
        """The answer may come after the probe that asked: at the end of a long step."""
        with contextlib.suppress(TimeoutError, DiptychError):
            await self.refresh_stats()

    # --- the end ------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Hear no more from the core. Safe to call twice, and without an event loop."""
        self.leaving = True
        if self._watcher is not None and not self._watcher.get_loop().is_closed():
            self._watcher.cancel()
            if self._question is not None:
                self._question.cancel()
        if self._client is not None:
            self._client.close()

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """End the process: politely first, then not. Safe to call twice."""
        self.process.stop(timeout_s)


async def _unless_dead(
    greeting: Coroutine[Any, Any, EngineDescription], watcher: asyncio.Task[EngineDeadError]
) -> EngineDescription:
    """A core that ends before it listens is nobody that a greeting could notice missing."""
    described = asyncio.create_task(greeting)
    try:
        await asyncio.wait((described, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not described.done():
            raise watcher.result()
        return described.result()
    finally:
        described.cancel()
