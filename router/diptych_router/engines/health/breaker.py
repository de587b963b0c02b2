"""A circuit breaker for one engine: if it fails too often, it gets no requests until a canary
succeeds.

    CLOSED ──most outcomes are failures──▶ OPEN ──time is up──▶ a canary is due
      ▲                                      ▲                        │
      └──────────── it went well ────────────┴──── it failed ◀── HALF OPEN

After Nygard's circuit breaker ("Release It!", 2007). Outcomes fade, so the last seconds decide.
Only a canary, which is no user's request, closes an open breaker; each time that it fails, the next
one comes later. The caller passes the time.
"""

from __future__ import annotations

import enum
from typing import Final

HALF_LIFE_S: Final = 10.0
"""After this many seconds an outcome counts half."""
LEAST_FAILURES: Final = 2.5
"""Fewer failures, after fading, open no breaker; three within a few seconds do."""
LEAST_PART: Final = 0.6
"""The share of the outcomes that must be failures."""
FIRST_OPEN_S: Final = 2.0
LONGEST_OPEN_S: Final = 60.0
FORGIVEN_S: Final = 300.0
"""A breaker that has been closed for this long begins with `FIRST_OPEN_S` again."""


class State(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    """A canary is running."""


class Breaker:
    """The outcomes of one engine."""

    def __init__(self, now: float) -> None:
        self.state = State.CLOSED
        self._well = self._badly = 0.0
        self._at = now
        """Until when both have faded."""
        self._times_opened = 0
        self._until = now
        """Open: when a canary is due. Closed: when it was closed."""

    def well(self, now: float) -> None:
        """Record that it did its part of a request."""
        left = 0.5 ** ((now - self._at) / HALF_LIFE_S)
        self._well, self._badly, self._at = self._well * left + 1.0, self._badly * left, now

    def badly(self, now: float) -> bool:
        """Record that it failed at a request and is at fault. True if that opens the breaker."""
        left = 0.5 ** ((now - self._at) / HALF_LIFE_S)
        self._well, self._badly, self._at = self._well * left, self._badly * left + 1.0, now
        least = max(LEAST_FAILURES, LEAST_PART * (self._well + self._badly))
        if self.state is not State.CLOSED or self._badly < least:
            return False
        if now > self._until + FORGIVEN_S:
            self._times_opened = 0
        self._open(now)
        return True

    def canary_due(self, now: float) -> bool:
        return self.state is State.OPEN and now >= self._until

    def begin_canary(self) -> None:
        self.state = State.HALF_OPEN

    def canary_ended(self, now: float, *, ok: bool) -> None:
        if ok:
            self.state, self._until = State.CLOSED, now
            self._well = self._badly = 0.0
        else:
            self._open(now)

    def badness(self) -> tuple[int, float]:
        """A key that orders open breakers: the one to use again first has the lowest."""
        return self._times_opened, self._badly / max(self._badly + self._well, 1.0)

    def _open(self, now: float) -> None:
        self._times_opened += 1
        doublings = min(self._times_opened - 1, 16)
        self.state, self._until = State.OPEN, now + min(FIRST_OPEN_S * 2**doublings, LONGEST_OPEN_S)
