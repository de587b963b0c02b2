"""Sends clients heartbeats for vLLM's core, which lives if it answers between two steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from diptych_frontend.core_client.heartbeat_timer import (
    BEAT_S,
    CALL_S,
    QUICK_CALLS,
    HeartbeatTimer,
)
from diptych_protocol.wire import Heartbeat

UNSEEN_STEP_S: Final = 10.0
"""A step may always take this many seconds, however short the steps before it were, because nobody
here knows what it will compute."""
ONE_SIZE: Final = 1


class CoreBeats:
    """Asks one core all the time, and sends a heartbeat for each answer."""

    def __init__(
        self,
        timer: HeartbeatTimer,
        ask: Callable[[], Awaitable[None]],
        tell: Callable[[Heartbeat], None],
        stood_still: Callable[[float], None],
    ) -> None:
        """
        Args:
            timer: knows the followers, and when a heartbeat is due.
            ask: returns when the core has answered.
            tell: sends a heartbeat to the followers.
            stood_still: called with the seconds that an answer took.
        """
        self._timer, self._ask, self._tell, self._stood_still = timer, ask, tell, stood_still
        self._calls = 0
        """Control calls that are being carried out, without quick ones."""

    @contextmanager
    def during_call(self, method: str) -> Iterator[None]:
        """Promise the time of a call while it lasts, even if the core answers meanwhile."""
        if method in QUICK_CALLS:
            yield
            return
        self._calls += 1
        self._promise(CALL_S, in_call=True)
        try:
            yield
        finally:
            self._calls -= 1

    async def run(self) -> None:
        """Ask the core and send heartbeats, for ever. Raises what `ask` raises."""
        while True:
            begin = time.monotonic()
            asked = asyncio.ensure_future(self._ask())
            try:
                done, _ = await asyncio.wait({asked}, timeout=BEAT_S)
                if not done and not self._calls:
                    bound_s = self._timer.steps.bound_s(ONE_SIZE)
                    self._promise(max(bound_s, UNSEEN_STEP_S))
                await asked
            finally:
                asked.cancel()
            now = time.monotonic()
            self._timer.steps.took(ONE_SIZE, now - begin)
            self._stood_still(now - begin)
            heartbeat = None if self._calls else self._timer.beat(now)
            if heartbeat is not None:
                self._tell(heartbeat)
            await asyncio.sleep(max(0.0, BEAT_S - (now - begin)))

    def _promise(self, seconds: float, *, in_call: bool = False) -> None:
        heartbeat = self._timer.before_silence(time.monotonic(), seconds, in_call=in_call)
        if heartbeat is not None:
            self._tell(heartbeat)
