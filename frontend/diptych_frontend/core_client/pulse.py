"""Distinguishes a busy engine core from one that hangs. The caller passes the time.

A core answers between two steps, so one in a long step is as silent as one that hangs; only time
distinguishes them. Time counts from the first question that showed no progress, so silence without
a question does not count.
"""

from __future__ import annotations

from typing import Final

from diptych_protocol import SchedulerStats

LATE_LOOK_S: Final = 0.5
"""If a look comes this much later than planned, this process stood still, and messages may be
unread."""


def stood_still_s(planned: float, now: float) -> float:
    """Return for how long this process stood still before a look at `now`; 0 if it did not."""
    late_s = now - planned
    return late_s if late_s > LATE_LOOK_S else 0.0


class Pulse:
    """What is known of one core's progress."""

    def __init__(self) -> None:
        self._steps = -1
        self._doubted_since: float | None = None

    def asked(self, now: float) -> None:
        """Record a question to the core."""
        if self._doubted_since is None:
            self._doubted_since = now

    def heard(self, stats: SchedulerStats) -> None:
        """Record a report of the core. The core is well if it has nothing to do or has made steps;
        while paused, it makes none on purpose."""
        has_work = stats.num_running + stats.num_waiting > 0 and not stats.paused
        if not has_work or stats.steps != self._steps:
            self._doubted_since = None
        self._steps = stats.steps

    def excuse(self) -> None:
        """Record that there was a reason for the silence so far."""
        self._doubted_since = None

    def excuse_seconds(self, seconds: float, now: float) -> None:
        """Record that there was a reason for this many of the seconds so far."""
        if self._doubted_since is not None:
            self._doubted_since = min(now, self._doubted_since + seconds)

    def doubtful_s(self, now: float) -> float:
        """Return for how many seconds there has been no sign of progress."""
        return 0.0 if self._doubted_since is None else now - self._doubted_since
