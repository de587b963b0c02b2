"""What the other routers of a service do, of which this one hears only through the engines.

Requests that two routers place in the same moment would meet at one idle engine, because reports
come later. So each router prefers engines of its own among equal ones, its *homes*, and expects
that the others give to theirs what it gives to its own. The caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_frontend.core_client.heartbeat_timer import MAX_FOLLOWERS

FADING_S: Final = 10.0
"""What was received this long ago counts 1/e of what is received now."""
MOST_OTHERS: Final = 4.0
"""The most requests of another router for each of this one's: few of its own say little."""


class RouterShare:
    """Which of the routers this is, and how much the others send, by what engines of a pool say."""

    def __init__(self) -> None:
        self.number, self.count = 0, 1
        self.of_another = 0.0
        """How many requests each other router sends for each one of this router's."""
        self._own = self._others = 0.0
        self._at = 0.0

    def told(self, words: Iterable[tuple[int, int]]) -> None:
        """Learn how many routers there are, and which one this is. The engine that knows of most is
        right: others have not heard of all yet, or their version counts none."""
        count, number = max(words, default=(1, 0))
        self.count = min(max(count, 1), MAX_FOLLOWERS)
        self.number = min(max(number, 0), self.count - 1)
        self._compare()

    def received(self, own: int, others: int, now: float) -> None:
        """An engine has received so many more requests from this router and from the others."""
        fading = math.exp(min(0.0, self._at - now) / FADING_S)
        self._own = self._own * fading + max(own, 0)
        self._others = self._others * fading + max(others, 0)
        self._at = max(now, self._at)
        self._compare()

    def _compare(self) -> None:
        self.of_another = 0.0
        if self.count > 1 and self._own:
            self.of_another = min(self._others / (self._own * (self.count - 1)), MOST_OTHERS)

    def homes(self, identities: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Divide engines among the routers, which all do it alike.

        identities: [engines] what all routers know them by. Returns [engines] which ones are this
        router's, and of how many others each is.
        """
        num_engines = len(identities)
        if not num_engines:
            return np.zeros(0, np.bool_), np.zeros(0, np.int64)
        rank = identities.argsort().argsort()
        routers = np.bincount(np.arange(self.count) % num_engines, minlength=num_engines)[rank]
        if self.count >= num_engines:
            mine = rank == self.number % num_engines
        else:
            mine, routers = rank % self.count == self.number, np.ones(num_engines, np.int64)
        return mine, routers - mine
