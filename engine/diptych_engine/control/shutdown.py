"""The end of an engine core, from the request to leave to the last step. Pure: time is passed in.

    RUNNING ──request──▶ REQUESTED ──nothing left, or time is up──▶ SHUTTING_DOWN

What comes after the request is answered at once: requests with an abort, calls with an error.
"""

from __future__ import annotations

import enum


class ShutdownState(enum.Enum):
    RUNNING = enum.auto()
    REQUESTED = enum.auto()
    SHUTTING_DOWN = enum.auto()


class Shutdown:
    """How far one core is on its way out."""

    def __init__(self) -> None:
        self.state = ShutdownState.RUNNING
        self._deadline = 0.0

    def request(self, now: float, timeout_s: float) -> None:
        """Leave when all requests have ended, in `timeout_s` at the latest."""
        self.state, self._deadline = ShutdownState.REQUESTED, now + timeout_s

    def advance(self, now: float, *, can_finish_more: bool) -> bool:
        """Whether the core is to end now. `can_finish_more`: requests are under way."""
        if self.state is ShutdownState.REQUESTED and not (can_finish_more and now < self._deadline):
            self.state = ShutdownState.SHUTTING_DOWN
        return self.state is ShutdownState.SHUTTING_DOWN

    def remaining_s(self, now: float) -> float:
        """Until time is up; 0 when nothing was requested."""
        return max(0.0, self._deadline - now)
