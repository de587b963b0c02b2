"""How often something happened lately. Pure: time is passed in."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from diptych_protocol.admin import RECENT_S

SLOT_S: Final = RECENT_S / 12
"""What happened within so many seconds is forgotten together."""

Kind = TypeVar("Kind", bound=Hashable)


class RecentCounts(Generic[Kind]):
    """Counts of the last `RECENT_S` seconds, exact to `SLOT_S`; as old as that, they are gone."""

    def __init__(self) -> None:
        self._slots = deque[tuple[int, Counter[Kind]]]()
        """Number of the slot, and what happened in it; the oldest first."""

    def add(self, kind: Kind, now: float) -> None:
        slot = int(now / SLOT_S)
        if not self._slots or self._slots[-1][0] < slot:
            self._forget(slot)
            self._slots.append((slot, Counter()))
        self._slots[-1][1][kind] += 1

    def total(self, now: float) -> Counter[Kind]:
        """What is remembered at this time."""
        self._forget(int(now / SLOT_S))
        return sum((counts for _, counts in self._slots), Counter())

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - RECENT_S / SLOT_S:
            self._slots.popleft()
