"""Checks that a leading operator really serves: each watch gets answers, and the queue moves.

A leader whose watches are broken looks like one with nothing to do. So each watch has to be
answered again within a time. If one is not, the shell (`__main__`) ends the process, and another
takes over. A problem that no restart would solve, such as a missing CRD, only makes the operator
unready. This module performs no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from diptych_operator.kube.client import RIGHTS

WATCH_TURN_S: Final = 60
"""The API server is asked to end each watch after this time; then the watch is renewed."""
SILENCE_S: Final = 180.0
"""A watch that was not renewed within this time is broken."""
START_S: Final = 60.0
"""A watch not started within this time is broken: kopf looks for a resource only once."""
STANDSTILL_S: Final = 600.0
"""The queue stands still if services have waited this long and no pass has ended."""


@dataclass(slots=True)
class WatchLiveness:
    """What the API server answered, and when. All times are of one clock that never goes back."""

    hindrance: str = "it has not looked at its Lease yet"
    """Why this operator serves nothing although it is well; empty if there is no reason."""
    _heard: dict[str, float] = field(default_factory=dict)
    """When each watch was last begun, by the path of what it watches."""
    _begun: set[str] = field(default_factory=set)
    _refused: dict[str, int] = field(default_factory=dict)

    def expect(self, watches: Iterable[str], now: float) -> None:
        """Expect answers of these watches from now on."""
        self._heard = dict.fromkeys(watches, now)
        self._begun.clear()
        self._refused.clear()

    def answered(self, watch: str, status: int, now: float) -> None:
        """Record that the API server answered a list or a watch with this HTTP status."""
        if watch in self._heard:
            if status == 200:
                self._heard[watch] = now
                self._begun.add(watch)
                self._refused.pop(watch, None)
            elif status in (403, 404):
                self._refused[watch] = status

    def faults(self, now: float, standstill_s: float) -> list[str]:
        """Return the faults that a restart of the process may repair.

        `standstill_s`: for how long services have waited in the queue while no pass ended.
        """
        found = [
            f"{watch} can no longer be watched: the API server answers {status}"
            + (f". {RIGHTS}" if status == 403 else "")
            for watch, status in self._refused.items()
        ]
        for watch in self._heard.keys() - self._refused.keys():
            limit = SILENCE_S if watch in self._begun else START_S
            if now - self._heard[watch] > limit:
                found.append(f"nothing was heard of {watch} for {limit:g} s")
        if standstill_s > STANDSTILL_S:
            found.append(f"no service was looked at for {STANDSTILL_S:g} s, and some wait")
        return sorted(found)

    def unready(self, now: float, standstill_s: float) -> list[str]:
        """Return everything that keeps the operator from serving, or from standing by."""
        return [*filter(None, [self.hindrance]), *self.faults(now, standstill_s)]
