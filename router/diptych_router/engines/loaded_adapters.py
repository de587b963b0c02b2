"""Which adapters an engine has loaded: by its reports, and by what was just sent to it.

An engine loads an adapter when its first request is scheduled. Until the engine reports it, an
engine that got a request with the adapter counts as having it, so that a burst of such requests
stays together. The caller passes the time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from diptych_router.engines.known_prefixes import MAX_ADAPTERS

EXPECTED_S: Final = 10.0
"""How long an adapter that was sent for counts as loaded, whatever the engine reports."""


class LoadedAdapters:
    """The adapters of one engine, by name."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()
        self._expected: dict[str, float] = {}
        """Until when each counts as loaded."""

    def tell(self, names: Collection[str], now: float) -> None:
        self._told = frozenset(names if len(names) <= MAX_ADAPTERS else ())
        if self._expected:
            self._expected = {name: end for name, end in self._expected.items() if end > now}

    def expect(self, name: str, now: float) -> None:
        """Record that a request with this adapter goes there."""
        if name in self._expected or len(self._expected) < MAX_ADAPTERS:
            self._expected[name] = now + EXPECTED_S

    def has(self, name: str, now: float) -> bool:
        return name in self._told or self._expected.get(name, now) > now
