"""Rates that are learned from what engines report: how long each part of their work takes.

A report says how long something took in all, and how much of each kind it was. The rates are those
that explain the reports best: weighted least squares, in which old reports fade, and which holds on
to what is known of the fleet as long as an engine has told little. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

FADING: Final = 0.98
"""How much a report counts when the next one has come."""
MOST_SECONDS: Final = 1e4
MOST_TIMES: Final = 1e6
"""Reports of more seconds, or of rates that are so many times as fast as expected, are no reports
of an engine's."""
SMALLEST_PART: Final = 1e-9
"""What is known beforehand counts at least so much of all that was seen, lest nothing decide
between kinds of work that always come together."""
LEAST_PART: Final = 0.01
"""No rate is below this part of the one that was known beforehand."""

Rates = NDArray[np.float64]


class LearnedRates:
    """Seconds that one of each kind takes."""

    def __init__(self, prior: Sequence[float], prior_seconds: float) -> None:
        """prior: what is known beforehand, all above 0. prior_seconds: it counts as much as so many
        seconds of each kind of work."""
        self.rates: Rates = np.array(prior)
        self._prior_seconds = prior_seconds
        self.told = False
        """Some report has taught something."""
        self._squares = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))

    def saw(self, amounts: Sequence[float], seconds: float, prior: Rates) -> None:
        """So much of each kind took so long in all. What cannot be true teaches nothing.

        prior: what is known beforehand, now.
        """
        seen = np.array(amounts, np.float64)
        if not (0 < seconds <= MOST_SECONDS and seen.min() >= 0 and seen.max() > 0):
            return
        if not (seen * prior).max() <= MOST_TIMES * seconds:
            return
        self.told = True
        # A sum of many durations varies in proportion to itself, hence the weight.
        self._squares = FADING * self._squares + np.outer(seen, seen) / seconds
        self._products = FADING * self._products + seen
        # In units of what was known, so that the numbers are of like size.
        squares = self._squares * np.outer(prior, prior)
        weight = self._prior_seconds + SMALLEST_PART * float(np.trace(squares))
        squares += weight * np.eye(len(prior))
        solved = np.linalg.solve(squares, self._products * prior + weight)
        self.rates = np.maximum(solved, LEAST_PART) * prior
