"""The breakers of all engines of a router, and which engines they exclude from its choice."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from diptych_router.engines.health.breaker import Breaker, State

MOST_OUT: Final = 0.5
"""At most this share of a pool is excluded, the worst of it. If more fail, excluding them would
overload the rest, and what fails everywhere is hardly the engines' fault. After Envoy's panic
threshold, which has the same default ("Panic threshold" in Envoy's documentation of load
balancing)."""


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


@dataclass(slots=True)
class EngineHealth:
    """One engine's breaker, and its history."""

    breaker: Breaker
    failures: Counter[Failure] = field(default_factory=Counter)
    opened: int = 0
    """How often its breaker opened."""
    kept_out: bool = False
    """Whether it gets no requests while others of its pool can take them."""


class HealthBook:
    """Health by the keys of engines, so that a restart at the same address does not clear it."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineHealth] = {}

    def add(self, key: str, now: float) -> None:
        """Add a new address."""
        self.engines[key] = EngineHealth(Breaker(now))

    def forget(self, key: str) -> None:
        """Forget an address that discovery no longer names."""
        self.engines.pop(key, None)

    def went_well(self, key: str, now: float) -> None:
        """Record that an engine has done its part of a request; an unknown one is ignored."""
        health = self.engines.get(key)
        if health is not None:
            health.breaker.well(now)

    def went_badly(self, key: str, failure: Failure, now: float) -> bool:
        """Record a failure. True if that opens the engine's breaker: call `sort_out` then."""
        health = self.engines.get(key)
        if health is None:
            return False
        health.failures[failure] += 1
        opens = health.breaker.badly(now)
        health.opened += opens
        return opens

    def canaries_due(self, keys: Collection[str], now: float) -> list[str]:
        """Return those of these engines to try now; report each to `Breaker.canary_ended`."""
        return [
            key
            for key, health in self.engines.items()
            if key in keys and health.breaker.canary_due(now)
        ]

    def sort_out(self, pools: Iterable[Sequence[str]]) -> None:
        """Decide which engines are excluded. pools: the keys of the usable engines of each pool."""
        for health in self.engines.values():
            health.kept_out = False
        for keys in pools:
            known = [self.engines[key] for key in keys if key in self.engines]
            open_now = [x for x in known if x.breaker.state is not State.CLOSED]
            open_now.sort(key=lambda health: health.breaker.badness(), reverse=True)
            for health in open_now[: int(MOST_OUT * len(keys))]:
                health.kept_out = True
