"""Finds whether an engine hangs: a heartbeat is overdue, or no step is made. It knows no clock."""

from __future__ import annotations

import math
from typing import Final

from diptych_frontend.core_client.heartbeat_timer import Pulse, stood_still_s
from diptych_protocol.wire import Heartbeat

GRACE_S: Final = 1.0
"""How late a heartbeat may be."""
MOST_PROMISED_S: Final = 600.0
"""A longer promise of silence is not believed."""
SILENT_S: Final = 10.0
"""An engine whose loop runs, and has work, but makes no step for this long is silent. `GRACE_S`
says how soon a hanging loop is detected."""
HANGS_S: Final = 4.0
"""An engine that has been silent for this long after a missed heartbeat hangs."""


class Liveness(Pulse):
    """What is known of one engine, from the moment that it answers.

    Every heartbeat promises when the next one comes. A late one may still be on its way, so the
    engine counts as silent only `GRACE_S` later. After this router itself has stood still, the wait
    begins again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.silent = False
        """It may hang, as `judge` found last."""
        self.sends_heartbeats = False
        """An engine of an older release sends none, and has to be asked."""
        self.in_call = False
        """Whether a control call keeps it from taking new requests."""
        self.overdue = False
        """A heartbeat should have come `GRACE_S` ago."""
        self._due = math.inf
        self._missed_at: float | None = None
        self._next_look = math.inf

    def beat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Record a heartbeat. Returns whether the engine should be judged now."""
        promised = heartbeat.within_s
        if not 0 <= promised <= MOST_PROMISED_S:
            promised = MOST_PROMISED_S
        self.sends_heartbeats, self.overdue, self._missed_at = True, False, None
        self._due = now + promised
        was_in_call, self.in_call = self.in_call, heartbeat.in_call
        self.asked(now)
        return self.silent or was_in_call or self.in_call

    def look(self, now: float) -> float:
        """Look whether a heartbeat is overdue. Returns the seconds until the next look."""
        stood_still = stood_still_s(self._next_look, now)
        self.excuse_seconds(stood_still, now)
        if now < self._due:
            self._next_look = self._due
        elif self._missed_at is None or (stood_still and not self.overdue):
            self._missed_at = now
            self._next_look = now + GRACE_S
        else:
            self.overdue = now >= self._missed_at + GRACE_S
            self._next_look = now + GRACE_S if self.overdue else self._missed_at + GRACE_S
        return self._next_look - now

    def judge(self, now: float) -> str:
        """Find whether it is silent. Returns what has changed, in words; empty if nothing has."""
        stuck = self.doubtful_s(now) > SILENT_S
        was_silent, self.silent = self.silent, self.overdue or stuck
        if self.silent == was_silent:
            return ""
        if not self.silent:
            return "works again"
        return f"has made no step for {SILENT_S:g} s" if stuck else "missed a heartbeat"

    def hangs(self, now: float) -> bool:
        """Whether it hangs, so that it keeps no request that another engine can take."""
        return self.overdue and self._missed_at is not None and now - self._missed_at >= HANGS_S
