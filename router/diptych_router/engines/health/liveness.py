"""Finds whether one engine hangs: a heartbeat is overdue, or its loop runs but makes no step. The
caller passes the time."""

from __future__ import annotations

from typing import Final

from diptych_frontend.core_client.pulse import Pulse
from diptych_protocol import SchedulerStats
from diptych_protocol.wire import Heartbeat
from diptych_router.engines.health.heartbeats import Heartbeats

SILENT_S: Final = 10.0
"""An engine whose loop runs, and has work, but makes no step for this long is silent. `heartbeats`
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
