"""Remembers which engines had no room a moment ago.

Without it, each request would be sent to every full engine. An entry is dropped within a second, or
as soon as the engine reports that fewer requests wait there. It only guides the choice: if no other
engine has room, a full one is tried all the same. The caller passes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from diptych_protocol import SchedulerStats

REMEMBERED_S: Final = 1.0


class _Refusal(NamedTuple):
    stats: SchedulerStats | None
    """The engine's last report when it refused."""
    until: float


class FullEngines:
    """Full engines, by their keys."""

    def __init__(self, stats_of: Callable[[str], SchedulerStats | None]) -> None:
        """`stats_of`: returns an engine's last report; None if nobody answers there."""
        self._stats_of = stats_of
        self._refusals: dict[str, _Refusal] = {}

    def refused(self, key: str, now: float) -> None:
        """Record that an engine had no room for a request."""
        self._refusals[key] = _Refusal(self._stats_of(key), now + REMEMBERED_S)

    def now(self, now: float) -> set[str]:
        """Return the engines that are full, as far as is known."""
        if not self._refusals:
            return set()
        for key in [k for k, refusal in self._refusals.items() if self._is_over(k, refusal, now)]:
            del self._refusals[key]
        return set(self._refusals)

    def _is_over(self, key: str, refusal: _Refusal, now: float) -> bool:
        stats, before = self._stats_of(key), refusal.stats
        if stats is None or before is None or now >= refusal.until:
            return True
        return stats is not before and stats.num_waiting < max(before.num_waiting, 1)
