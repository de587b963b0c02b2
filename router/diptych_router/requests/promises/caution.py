"""Which requests would miss their deadline, by predictions and by how far those were off.

What a router expects is exact only to the age of the engines' reports, to the step that is
running, and to what other routers place meanwhile. Where requests just keep a promise, a small
error decides. So predictions are multiplied by a factor that is learned: most first tokens come
within the factor times what was expected. Pure.
"""

from __future__ import annotations

import math
from typing import Final

from diptych_router.choosing.first_token import FirstToken

MOST: Final = 0.95
"""Part of the first tokens that come within the factor times what was expected."""
GAIN: Final = 0.1
"""How fast the factor follows: its logarithm rises by so much times `MOST` with a first token that
is later, and falls by so much times the rest with one that is not."""
MOST_FACTOR: Final = 4.0
TELLING_PART: Final = 0.2
"""Only waits of at least this part of what is promised teach: the others are seldom missed, and
what is not a wait makes up most of them. So long as a wait that times `MOST_FACTOR` is too long is
above that, the factor can fall again."""


class Caution:
    """One router's, about one promise."""

    def __init__(self, promised_s: float) -> None:
        self.promised_s = promised_s
        self.factor = 1.0

    def late_s(self, first: FirstToken, *, alone: bool = False) -> float:
        """By how much a request would miss the promise; not above 0: it is kept.

        A prompt that takes longer than what is promised, on an engine that does nothing else, can
        never keep the promise: then only the wait counts, so that it is served some time.
        alone: if its tenant had no other request there.
        """
        wait_s = self.factor * (first.wait_for_others_s if alone else first.wait_s)
        own_s = self.factor * first.compute_s if self.is_possible(first) else 0.0
        return wait_s + own_s - self.promised_s

    def is_possible(self, first: FirstToken) -> bool:
        """An engine that does nothing else would keep the promise."""
        return self.factor * first.compute_s <= self.promised_s

    def saw(self, first: FirstToken, took_s: float) -> None:
        """A first token that was expected has come."""
        expected_s = first.wait_s + first.compute_s
        if not TELLING_PART * self.promised_s <= expected_s <= self.promised_s:
            return
        late = took_s > self.factor * expected_s
        self.factor *= math.exp(GAIN * (MOST if late else MOST - 1.0))
        self.factor = min(max(self.factor, 1.0), MOST_FACTOR)
