"""Which engines fail or have no room, and whom that excludes. The caller passes the time."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych_protocol import SchedulerStats

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


class Failure(enum.StrEnum):
    """The kinds of an engine's failures."""

    ERROR = "error"
    """It failed with a request that another engine then served."""
    LOST = "lost"
    """Its connection or its process ended during requests."""
    HANG = "hang"
    """It kept requests while its loop was silent."""
    LATE = "late"
    """It missed the deadline of a first token."""


class Breaker:
    """The outcomes of one engine, and its history. If it fails too often, it gets no requests until
    a canary succeeds.

        CLOSED ──most outcomes are failures──▶ OPEN ──time is up──▶ a canary is due
          ▲                                      ▲                        │
          └──────────── it went well ────────────┴──── it failed ◀── HALF OPEN

    After Nygard's circuit breaker ("Release It!", 2007). Outcomes fade, so the last seconds decide.
    Only a canary, which is no user's request, closes an open breaker; each time that it fails, the
    next one comes later.
    """

    def __init__(self, now: float) -> None:
        self.state = State.CLOSED
        self.failures = Counter[Failure]()
        self.num_opened = 0
        """How often failures of requests opened it."""
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
        self.num_opened += 1
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
        self.state = State.OPEN
        self._until = now + back_off_s(self._times_opened, FIRST_OPEN_S, LONGEST_OPEN_S)


def back_off_s(times: int, first_s: float, longest_s: float) -> float:
    """Return how long to wait after so many failures in a row: each time twice as long."""
    return min(longest_s, first_s * 2.0 ** min(times - 1, 16))


FIRST_CLOSED_S: Final = 60.0
LONGEST_CLOSED_S: Final = 600.0
TRIAL_S: Final = 300.0
"""Longer than a hand-off may take."""


@dataclass(slots=True)
class _Way:
    failures: int = 0
    """Since a hand-off went well on it."""
    times_closed: int = 0
    closed_until: float = -math.inf
    on_trial: bool = False


class ClosedWays:
    """Ways from engine to engine on which hand-offs fail, though the engines are well: the network
    between them is broken.

    Each failure costs a request a time-out. So after two in a row a way is closed, and others are
    taken: the decode engine's own if there are none. When the time is up, one request tries it.
    """

    def __init__(self) -> None:
        self.of: dict[tuple[str, str], _Way] = {}
        """By the keys of sender and receiver; mostly there are none."""

    def failed(self, sender: str, receiver: str, now: float) -> float:
        """Record that a hand-off failed. Returns for how many seconds that closes the way."""
        way = self.of.setdefault((sender, receiver), _Way())
        way.failures += 1
        if way.failures < 2 or (now < way.closed_until and not way.on_trial):
            return 0.0
        way.times_closed, way.on_trial = way.times_closed + 1, False
        closed_s = back_off_s(way.times_closed, FIRST_CLOSED_S, LONGEST_CLOSED_S)
        way.closed_until = now + closed_s
        return closed_s

    def worked(self, sender: str, receiver: str) -> None:
        self.of.pop((sender, receiver), None)

    def closed(self, sender: str, receiver: str, now: float) -> bool:
        """Whether a request must not go there. It may if it is the first after the time."""
        way = self.of.get((sender, receiver))
        if way is None or not way.times_closed:
            return False
        if now < way.closed_until:
            return True
        way.on_trial, way.closed_until = True, now + TRIAL_S
        return False

    def forget(self, engine: str) -> None:
        """An engine is gone, and whoever comes in its place is another."""
        self.of = {way: state for way, state in self.of.items() if engine not in way}


MOST_OUT: Final = 0.5
"""At most this share of a pool is excluded, the worst of it. If more fail, excluding them would
overload the rest, and what fails everywhere is hardly the engines' fault. As "Panic threshold" in
Envoy's documentation of load balancing, with the same default."""


def left_out(pool: Mapping[str, Breaker]) -> list[str]:
    """Return the engines that get no requests while others of their pool can take them. pool: its
    usable engines, by their keys."""
    open_now = [(key, each) for key, each in pool.items() if each.state is not State.CLOSED]
    open_now.sort(key=lambda one: one[1].badness(), reverse=True)
    return [key for key, _ in open_now[: int(MOST_OUT * len(pool))]]


REMEMBERED_S: Final = 1.0


class _Refusal(NamedTuple):
    stats: SchedulerStats | None
    """The engine's last report when it refused."""
    until: float


@dataclass(eq=False, slots=True)
class FullEngines:
    """The engines, by their keys, that had no room a moment ago.

    Without it, each request would be sent to every full engine. An entry is dropped within a
    second, or as soon as the engine reports that fewer requests wait there. It only guides the
    choice: if no other engine has room, a full one is tried all the same.
    """

    _stats_of: Callable[[str], SchedulerStats | None]
    """Returns an engine's last report; None if nobody answers there."""
    refusals: dict[str, _Refusal] = field(default_factory=dict)
    """The newest refusal of each; old ones are dropped by `now`."""

    def refused(self, key: str, now: float) -> None:
        self.refusals[key] = _Refusal(self._stats_of(key), now + REMEMBERED_S)

    def now(self, now: float) -> set[str]:
        """Return the engines that are full, as far as is known."""
        for key in [k for k, refusal in self.refusals.items() if self._is_over(k, refusal, now)]:
            del self.refusals[key]
        return set(self.refusals)

    def _is_over(self, key: str, refusal: _Refusal, now: float) -> bool:
        stats, before = self._stats_of(key), refusal.stats
        if stats is None or before is None or now >= refusal.until:
            return True
        return stats is not before and stats.num_waiting < max(before.num_waiting, 1)
