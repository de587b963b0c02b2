"""How fast the API server is asked: an upgrade of a thousand services must not drown it."""

from __future__ import annotations

import asyncio
import time
from typing import Final

RATE: Final = 100.0
"""Requests a second."""
BURST: Final = 200.0
"""Requests that may follow each other at once after a rest."""


class Pace:
    """A bucket of tokens. What is small or urgent takes one and never waits: leases, statuses,
    sizes, Secrets. Children that are applied wait until there is one left for them."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._filled_at = burst, time.monotonic()
        self._line = asyncio.Lock()

    def take(self) -> None:
        self._fill()
        self._tokens -= 1

    async def wait_and_take(self) -> None:
        async with self._line:  # in the order in which they came
            while self._fill() < 1:
                await asyncio.sleep((1 - self._tokens) / self._rate)
            self._tokens -= 1

    def _fill(self) -> float:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return self._tokens
