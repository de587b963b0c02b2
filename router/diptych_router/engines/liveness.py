"""Finds whether one engine hangs: a heartbeat is overdue, or its loop runs but makes no step. The
caller passes the time."""

from __future__ import annotations

import math
from typing import Final

from diptych_frontend.core_client.heartbeat_timer import Pulse, stood_still_s
from diptych_protocol import SchedulerStats
from diptych_protocol.wire import Heartbeat

GRACE_S: Final = 1.0
"""How late a heartbeat may be."""
MOST_PROMISED_S: Final = 600.0
"""A longer promise of silence is not believed."""


class Heartbeats:
    """The heartbeats of one engine's loop, from the moment that it answers.

    Every heartbeat promises when the next one comes. A late one may still be on its way, so the
    engine counts as silent only `GRACE_S` later. After this router itself has stood still, the wait
    begins again.
    """

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


SILENT_S: Final = 10.0
"""An engine whose loop runs, and has work, but makes no step for this long is silent. `GRACE_S`
says how soon a hanging loop is detected."""
HANGS_S: Final = 4.0
"""An engine that has been silent for this long after a missed heartbeat hangs."""


class Liveness:
    """What is known of one engine, from the moment that it answers."""

    def __init__(self) -> None:
        self.silent = False
        """It may hang, as `judge` found last."""
        self._pulse = Pulse()
        self._heartbeats = Heartbeats()

    @property
    def sends_heartbeats(self) -> bool:
        """Whether it sends heartbeats. An engine of an older release does not, and
        has to be asked."""
        return self._heartbeats.heard

    @property
    def in_call(self) -> bool:
        """Whether a control call keeps it from taking new requests."""
        return self._heartbeats.in_call

    def asked(self, now: float) -> None:
        """Record that it was asked for its statistics."""
        self._pulse.asked(now)

    def told(self, stats: SchedulerStats) -> None:
        """Record that it reported its statistics."""
        self._pulse.heard(stats)

    def beat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Record a heartbeat. Returns whether the engine should be judged now."""
        was_in_call = self.in_call
        self._heartbeats.beat(heartbeat, now)
        self._pulse.asked(now)
        return self.silent or was_in_call or heartbeat.in_call

    def look(self, now: float) -> float:
        """See `Heartbeats.look`. Seconds in which this process stood still do not count against the
        engine."""
        self._pulse.excuse_seconds(self._heartbeats.stood_still_s(now), now)
        return self._heartbeats.look(now)

    def judge(self, now: float) -> str:
        """Find whether it is silent. Returns what has changed, in words; empty if nothing has."""
        stuck = self._pulse.doubtful_s(now) > SILENT_S
        was_silent, self.silent = self.silent, self._heartbeats.silent or stuck
        if self.silent == was_silent:
            return ""
        if not self.silent:
            return "works again"
        return f"has made no step for {SILENT_S:g} s" if stuck else "missed a heartbeat"

    def hangs(self, now: float) -> bool:
        """Whether it hangs, so that it keeps no request that another engine can take."""
        return self._heartbeats.silent and self._heartbeats.missed_s(now) >= HANGS_S
