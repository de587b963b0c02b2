"""Virtual time: things happen in the order of their times, and no time passes in between."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

MAX_AT_ONCE = 5000
"""More events without time passing are taken for a loop."""


class Clock:
    """A queue of calls to come. Two for the same time happen in the order in which they came in."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning of the world."""
        self.events = 0
        """Calls made so far."""
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        self._since_time_passed = 0

    def after(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call when so many seconds have passed."""
        self.at(self.now + delay, call, *args)

    def at(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call at a time; one in the past happens next."""
        self._order += 1
        heapq.heappush(self._queue, (max(time, self.now), self._order, call, args))

    @property
    def next_time(self) -> float:
        """The time of the next call; infinity if there is none."""
        return self._queue[0][0] if self._queue else float("inf")

    def step(self) -> bool:
        """Make the next call; False if there is none."""
        if not self._queue:
            return False
        time, _, call, args = heapq.heappop(self._queue)
        self._since_time_passed = self._since_time_passed + 1 if time == self.now else 0
        assert self._since_time_passed < MAX_AT_ONCE, "P3: something goes on without end at once"
        self.now = time
        self.events += 1
        call(*args)
        return True
