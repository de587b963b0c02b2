"""Learns rates from engines' reports: how long each part of their work takes.

A report gives the total time of some work, and how much of each kind it included. The rates are
those that explain the reports best: weighted least squares, in which old reports fade, and which
stays near the fleet's present rates while an engine has reported little. An engine that seemed slow
gets no work that could tell otherwise, so what it has reported fades meanwhile too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

FADING: Final = 0.98
"""How much a report counts when the next one has come."""
IDLE_FADING: Final = 0.999
"""The same when one without work has come, of which there are two a second."""
MOST_SECONDS: Final = 1e4
MOST_TIMES: Final = 1e6
"""Reports of more seconds, or of rates so many times as fast as expected, are ignored."""
SMALLEST_PART: Final = 1e-9
"""Prior knowledge counts at least this share of all reports, so that kinds of work which always
occur together can be separated."""
LEAST_PART: Final = 0.01
"""No rate is below this share of its prior."""

Rates = NDArray[np.float64]


class LearnedRates:
    """The learned seconds for one unit of each kind."""

    def __init__(self, prior: Sequence[float], prior_seconds: float) -> None:
        """prior: the expected rates, all above 0. prior_seconds: how many seconds of each kind of
        work they count as."""
        self.rates = self._prior = np.array(prior)
        self._prior_seconds = prior_seconds
        self.told = False
        """Some report has taught something."""
        self._squares = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))

    def saw(self, amounts: Sequence[float], seconds: float, prior: Rates | None = None) -> None:
        """Learn from a report: these amounts of each kind took this long in total. Impossible
        reports are ignored. prior: the present expectation; None: that of the beginning."""
        prior = self._prior if prior is None else prior
        seen = np.array(amounts, np.float64)
        if not (0 < seconds <= MOST_SECONDS and seen.min() >= 0 and seen.max() > 0):
            return
        if not (seen * prior).max() <= MOST_TIMES * seconds:
            return
        self.told = True
        # A sum of many durations varies in proportion to itself, hence the weight.
        known = self._squares @ seen
        if size := float(known @ seen):
            fading = (1.0 - FADING) / size * known
            self._products -= float(self._products @ seen) * fading
            self._squares -= np.outer(fading, known)
        self._squares += np.outer(seen, seen) / seconds
        self._products += seen
        self._solve(prior)

    def saw_nothing(self, prior: Rates) -> None:
        """There was no such work since the last report. prior: the present expectation."""
        if self.told:
            self._squares *= IDLE_FADING
            self._products *= IDLE_FADING
            self._solve(prior)

    def _solve(self, prior: Rates) -> None:
        # In units of what was known, so that the numbers are of like size.
        squares = self._squares * np.outer(prior, prior)
        weight = self._prior_seconds + SMALLEST_PART * float(np.trace(squares))
        squares += weight * np.eye(len(prior))
        solved = np.linalg.solve(squares, self._products * prior + weight)
        self.rates = np.maximum(solved, LEAST_PART) * prior
