"""Decides which requests would miss their deadline, by predictions and their past errors.

What a router expects is exact only to the age of the engines' reports, to the step that is running,
and to what other routers place meanwhile. Where requests just keep a promise, a small error
decides. So predictions are multiplied by a learned factor: most first tokens come within the factor
times the expected time.
"""

from __future__ import annotations

import math
from typing import Final

from diptych_router.choosing.first_token import FirstToken

MOST: Final = 0.95
"""The share of first tokens that come within the factor times the expected time."""
GAIN: Final = 0.1
"""How fast the factor changes. Its logarithm rises by this times `MOST` with a first token that is
later, and falls by this times the rest with one that is not."""
MOST_FACTOR: Final = 4.0
TELLING_PART: Final = 0.2
"""Only waits of at least this share of the promise teach, because shorter ones are seldom missed
and consist mostly of computing. As long as a wait that is too long when multiplied by `MOST_FACTOR`
is above that share, the factor can fall again."""


class Caution:
    """The caution of one router about one promise."""

    def __init__(self, promised_s: float) -> None:
        self.promised_s = promised_s
        self.factor = 1.0

    def late_s(self, first: FirstToken, *, alone: bool = False) -> float:
        """Return by how much a request would miss the promise; at most 0 if it keeps it.

        A prompt that takes longer than the promise on an idle engine can never keep it. Then only
        the wait counts, so that it is served at some time. alone: if its tenant had no other
        request there.
        """
        wait_s = self.factor * (first.wait_for_others_s if alone else first.wait_s)
        own_s = self.factor * first.compute_s if self.is_possible(first) else 0.0
        return wait_s + own_s - self.promised_s

    def is_possible(self, first: FirstToken) -> bool:
        """Whether an idle engine would keep the promise."""
        return self.factor * first.compute_s <= self.promised_s

    def saw(self, first: FirstToken, took_s: float) -> None:
        """Learn from a first token that was predicted and has come."""
        expected_s = first.wait_s + first.compute_s
        if not TELLING_PART * self.promised_s <= expected_s <= self.promised_s:
            return
        late = took_s > self.factor * expected_s
        self.factor *= math.exp(GAIN * (MOST if late else MOST - 1.0))
        self.factor = min(max(self.factor, 1.0), MOST_FACTOR)
