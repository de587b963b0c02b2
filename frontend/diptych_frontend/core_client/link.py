"""A client's link to its core: the process, the connection, and the watch over both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

import msgspec

from diptych_frontend.core_client.client import CoreClient
from diptych_frontend.core_client.launcher import Core
from diptych_protocol import (
    ClientClosedError,
    EngineCoreOutputs,
    EngineDeadError,
    EngineDescription,
)

log = logging.getLogger(__name__)

CAUSE_GRACE_S = 1.0
"""After a connection has ended, the process may end within this time too, and the reverse, before
the cause is reported."""
MAX_OUTPUTS_AT_ONCE = 128
"""A larger step is handled in pieces, so that the event loop can do other work in between."""


class CoreLink:
    """Opened at its first use, inside a running loop; it can be made without one."""

    def __init__(
        self,
        core: Core,
        *,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_dead: Callable[[EngineDeadError], None],
    ) -> None:
        """`on_dead` may be called more than once, with the best known cause first."""
        self.core = core
        self._on_outputs = on_outputs
        self._on_dead = on_dead
        self._client: CoreClient | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[EngineDescription] | None = None
        self._backlog: deque[EngineCoreOutputs] = deque()
        self._line_ended = asyncio.Event()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether the core is being watched."""
        return self._client is not None

    @property
    def is_ready(self) -> bool:
        """Whether the core has described itself."""
        return self._greeting is not None and self._greeting.done() and not _failed(self._greeting)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def client(self) -> CoreClient:
        """The connection. Raises `EngineDeadError` before there is one, and `ClientClosedError`
        after `close`."""
        if self._closed:
            raise ClientClosedError(f"the client of {self.core.endpoint} was closed")
        if self._client is None:
            raise EngineDeadError("the engine is not started: await ready() first")
        return self._client

    def open(self) -> None:
        """Connect and begin to watch; harmless if that was done."""
        if self._client is not None or self._closed:
            return
        self._client = CoreClient(
            self.core.endpoint,
            self.core.keys,
            on_outputs=self._take,
            on_lost=self._connection_lost,
        )
        self._watcher = asyncio.create_task(self._watch(), name="core watcher")

    async def greet(self, timeout_s: float) -> EngineDescription:
        """Wait until the core can serve, and return its description. Several callers may wait
        together.

        Raises what `CoreClient.describe` raises, and `EngineDeadError` if the process ends.
        """
        self.open()
        client = self.client  # raises after `close`, also to those who were greeted before
        if self._greeting is None or _failed(self._greeting):
            greeting = asyncio.create_task(self._greet(client, timeout_s), name="core greeting")
            greeting.add_done_callback(_mark_seen)
            self._greeting = greeting
        return await asyncio.shield(self._greeting)

    async def _greet(self, client: CoreClient, timeout_s: float) -> EngineDescription:
        """A core that ends before it listens is nobody that a greeting could notice missing."""
        described = asyncio.create_task(client.describe(timeout_s))
        ended = asyncio.create_task(self.core.wait())
        try:
            await asyncio.wait((described, ended), return_when=asyncio.FIRST_COMPLETED)
            if not described.done():
                raise ended.result()
            self.core.unlink()
            return described.result()
        finally:
            described.cancel()
            ended.cancel()

    def close(self) -> None:
        """Disconnect. Safe to call twice, and without a loop."""
        if self._closed:
            return
        self._closed = True
        self._backlog.clear()
        if self._watcher is not None and not self._watcher.get_loop().is_closed():
            self._watcher.cancel()
        if self._client is not None:
            self._client.close()  # which ends the greeting too

    # --- what the connection brings -----------------------------------------------------------

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

    def take_outputs(self, timeout_s: float) -> None:
        """Pass on everything that has arrived, without the event loop; wait for the first message
        at most `timeout_s`."""
        self.client.take_outputs(timeout_s)
        while self._backlog:
            self._hand_over(self._backlog.popleft())

    def _hand_over(self, message: EngineCoreOutputs) -> None:
        try:
            self._on_outputs(message)
        except Exception as exc:
            log.exception("outputs of the core cannot be handled")
            self._die(EngineDeadError(f"the output handler failed: {exc!r}"))

    # --- the end ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        cause = await self.core.wait()
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
        if not self._closed:
            self._on_dead(cause)


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
