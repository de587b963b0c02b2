"""Judges an engine by the heartbeats of its loop.

Every heartbeat promises when the next one comes. A late one may still be on its way, so the engine
counts as silent only `GRACE_S` later. After this router itself has stood still, the wait begins
again. The caller passes the time.
"""

from __future__ import annotations

import math
from typing import Final

from diptych_frontend.core_client.pulse import stood_still_s
from diptych_protocol.wire import Heartbeat

GRACE_S: Final = 1.0
"""How late a heartbeat may be."""
MOST_PROMISED_S: Final = 600.0
"""A longer promise of silence is not believed."""


class Heartbeats:
    """The heartbeats of one engine, from the moment that it answers."""

    def __init__(self) -> None:
        self.heard = False
        """It sends heartbeats at all: an engine of an older release does not."""
        self.in_call = False
        """Whether a control call keeps it from taking new requests."""
        self.silent = False
        """A heartbeat is overdue."""
        self._due = math.inf
        self._missed_at: float | None = None
        self._next_look = math.inf

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        promised = heartbeat.within_s
        if not 0 <= promised <= MOST_PROMISED_S:
            promised = MOST_PROMISED_S
        self.heard, self.silent, self._missed_at = True, False, None
        self.in_call = heartbeat.in_call
        self._due = now + promised

    def stood_still_s(self, now: float) -> float:
        """Return for how long this process stood still before a look at `now`; 0 if it did not."""
        return stood_still_s(self._next_look, now)

    def look(self, now: float) -> float:
        """Judge the engine. Returns the seconds until the next look, if it has ever sent a
        heartbeat."""
        stood_still = self.stood_still_s(now) > 0
        if now < self._due:
            self._next_look = self._due
        elif self._missed_at is None or (stood_still and not self.silent):
            self._missed_at = now
            self._next_look = now + GRACE_S
        else:
            self.silent = now >= self._missed_at + GRACE_S
            self._next_look = now + GRACE_S if self.silent else self._missed_at + GRACE_S
        return self._next_look - now

    def missed_s(self, now: float) -> float:
        """Return for how long a heartbeat has been overdue; 0 if none is."""
        return 0.0 if self._missed_at is None else now - self._missed_at
