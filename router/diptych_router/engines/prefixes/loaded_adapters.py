"""Which adapters an engine has loaded: what it says of it, and what was just sent to it.

An engine loads an adapter when its first request is scheduled. Until it says so, whoever got a
request with the adapter counts as having it, lest a burst of them scatter. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

MAX_ADAPTERS: Final = 1024
"""An engine that says to have more is not believed."""
EXPECTED_S: Final = 10.0
"""For so long an adapter that was sent for counts as loaded, whatever the engine says."""


class LoadedAdapters:
    """Those of one engine, by their names."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()
        self._expected: dict[str, float] = {}
        """Until when each counts as loaded."""

    def tell(self, names: Collection[str], now: float) -> None:
        """The engine says which adapters are loaded."""
        self._told = frozenset(names if len(names) <= MAX_ADAPTERS else ())
        if self._expected:
            self._expected = {name: end for name, end in self._expected.items() if end > now}

    def expect(self, name: str, now: float) -> None:
        """A request with this adapter goes there."""
        if name in self._expected or len(self._expected) < MAX_ADAPTERS:
            self._expected[name] = now + EXPECTED_S

    def has(self, name: str, now: float) -> bool:
        return name in self._told or self._expected.get(name, now) > now
