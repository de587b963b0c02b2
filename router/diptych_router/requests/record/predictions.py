"""Measures a router's predictions: counts real seconds divided by predicted ones."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from diptych_router.engines.engine_table import ROLES, Role
from diptych_router.requests.record.request_record import RequestRecord

BOUNDS: Final = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Ratios:
    """Counts of ratios, by the lowest of `BOUNDS` that is at least as large."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def saw(self, ratio: float) -> None:
        """Count one more."""
        self.counts[bisect_left(BOUNDS, ratio)] += 1
        self.sum += ratio


class Predictions:
    """How well the predictions of one router came true."""

    def __init__(self) -> None:
        self.first_token: dict[Role, Ratios] = {role: Ratios() for role in ROLES}
        """By the pool that computed the prompt."""
        self.hand_off = Ratios()

    def saw_word(self, record: RequestRecord) -> None:
        """Record the first output of a request's newest placement."""
        attempt = record.newest
        if attempt is None or attempt.placements[-1:] != [record.placement]:
            return
        match len(attempt.placements):
            case 1:
                real_s, expected_s = attempt.first_token_s, attempt.first_token_expected_s
                ratios = self.first_token[record.pool]
            case 2:
                real_s, expected_s = attempt.hand_off_s, attempt.hand_off_expected_s
                ratios = self.hand_off
            case _:
                return
        if expected_s and real_s is not None:
            ratios.saw(real_s / expected_s)
