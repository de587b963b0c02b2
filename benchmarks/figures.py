"""What was measured, and what is said of it: medians, spreads, ratios of neighbours in time.

Pure. A ratio is taken within each repetition, where both systems ran one after the other, and only
then summed up: what slows the whole machine for a minute slows both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """One system, measured once in one case."""

    case: str
    """Name of the case, such as `128/4`; what its parts mean is up to the scenario."""
    system: str
    repetition: int
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the range of several values of one figure."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises `ValueError` if there are none."""
        if not values:
            raise ValueError("no values")
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 1) -> str:
        """The median, and how far the others lie from it."""
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def names_in_order(values: Iterable[str]) -> list[str]:
    """Each once, as they first came."""
    return list(dict.fromkeys(values))


def spread(records: Iterable[Record], case: str, system: str, figure: str) -> Spread | None:
    """None: this was not measured."""
    values = [
        record.figures[figure]
        for record in records
        if (record.case, record.system) == (case, system) and figure in record.figures
    ]
    return Spread.of(values) if values else None


def ratio(
    records: Sequence[Record], case: str, figure: str, system: str, other: str
) -> Spread | None:
    """The figure of `system` over that of `other`, repetition by repetition; None: not measured."""
    values = {
        (record.system, record.repetition): record.figures[figure]
        for record in records
        if record.case == case and figure in record.figures
    }
    quotients = [
        value / values[other, repetition]
        for (name, repetition), value in values.items()
        if name == system and values.get((other, repetition))
    ]
    return Spread.of(quotients) if quotients else None
