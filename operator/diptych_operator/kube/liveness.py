"""Whether an operator that leads really serves: each watch is heard, and the queue moves. Pure.

A leader that hears nothing looks like one to whom nothing happens. So each watch has to answer
anew within a time; the shell (`__main__`) ends the process when one does not, and another takes
over. What no restart would mend, such as a CRD that is not there, makes it unready only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

WATCH_TURN_S: Final = 60
"""The API server is asked to end a watch after so long; then it is begun anew."""
SILENCE_S: Final = 180.0
"""A watch that was not begun anew in this time is deaf."""
START_S: Final = 60.0
"""So is one that was not begun at all in this time: what is not there when kopf looks for it, it
never looks for again."""
STANDSTILL_S: Final = 600.0
"""A queue in which services wait for so long, and no pass ends, stands still."""


@dataclass(slots=True)
class WatchLiveness:
    """What was heard, and when. All times are of one clock that never goes back."""

    hindrance: str = "it has not looked at its Lease yet"
    """Why this operator serves nothing though it is well; empty if there is no reason."""
    _heard: dict[str, float] = field(default_factory=dict)
    """When each watch was last begun, by the path of what it watches."""
    _begun: set[str] = field(default_factory=set)
    _refused: dict[str, int] = field(default_factory=dict)

    def expect(self, watches: Iterable[str], now: float) -> None:
        """These watches are to be heard from now on."""
        self._heard = dict.fromkeys(watches, now)
        self._begun.clear()
        self._refused.clear()

    def answered(self, watch: str, status: int, now: float) -> None:
        """The API server has answered a list or a watch with this HTTP status."""
        if watch in self._heard:
            if status == 200:
                self._heard[watch] = now
                self._begun.add(watch)
                self._refused.pop(watch, None)
            elif status in (403, 404):
                self._refused[watch] = status

    def faults(self, now: float, standstill_s: float) -> list[str]:
        """What another life of the process may mend.

        `standstill_s`: for how long services have waited in the queue while no pass ended.
        """
        found = [
            f"{watch} can no longer be watched: the API server answers {status}"
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
        """All that keeps it from serving, or from standing by."""
        return [*filter(None, [self.hindrance]), *self.faults(now, standstill_s)]
