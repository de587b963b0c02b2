"""The end of an engine core, from the request to end to the last step. The caller passes the time.

    RUNNING ──request──▶ REQUESTED ──nothing left, or time is up──▶ SHUTTING_DOWN

Messages after the request are answered at once: requests with an abort, calls with an error.
"""

from __future__ import annotations

import enum


class ShutdownState(enum.Enum):
    RUNNING = enum.auto()
    REQUESTED = enum.auto()
    SHUTTING_DOWN = enum.auto()


class Shutdown:
    """The state of one core's shutdown."""

    def __init__(self) -> None:
        self.state = ShutdownState.RUNNING
        self._deadline = 0.0

    def request(self, now: float, timeout_s: float) -> None:
        """End when all requests have ended, but after `timeout_s` at the latest."""
        self.state, self._deadline = ShutdownState.REQUESTED, now + timeout_s

    def advance(self, now: float, *, can_finish_more: bool) -> bool:
        """Whether the core has to end now. `can_finish_more`: there are unfinished requests."""
        if self.state is ShutdownState.REQUESTED and not (can_finish_more and now < self._deadline):
            self.state = ShutdownState.SHUTTING_DOWN
        return self.state is ShutdownState.SHUTTING_DOWN

    def remaining_s(self, now: float) -> float:
        """Return the seconds until time is up; 0 when no end was requested."""
        return max(0.0, self._deadline - now)
