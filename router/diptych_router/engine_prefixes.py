"""Follows what the engines of both pools remember, and says what of a prompt each of them has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from diptych_protocol.wire import PrefixChanges
from diptych_router.engine_link import EngineLink
from diptych_router.policy import RequestView
from diptych_router.prefixes.block_keys import BlockNaming
from diptych_router.prefixes.known_prefixes import KnownPrefixes

EXPECTED_S: Final = 10.0
"""How long, at least, a prompt that was sent counts as remembered, before its engine says so."""


class EnginePrefixes:
    """For the engines' links."""

    def __init__(self) -> None:
        self._known = KnownPrefixes()
        self._followed: dict[str, int] = {}
        """Key -> which connection the engine was asked over last: `EngineLink.times_up`."""
        self._age_at = -math.inf

    def follow(self, up: Iterable[EngineLink]) -> None:
        """Ask those engines that are new."""
        for link in up:
            if self._followed.get(link.key) != link.times_up:
                self._known.forget(link.key)
                self._followed[link.key] = link.times_up
                link.follow_prefixes()

    def take(self, link: EngineLink, changes: PrefixChanges) -> None:
        """An engine tells what it remembers."""
        most = link.description.num_blocks if link.description is not None else 0
        if not self._known.take(link.key, changes, most):
            link.follow_prefixes()

    def forget(self, key: str) -> None:
        """There is no such engine any more."""
        self._followed.pop(key, None)
        self._known.forget(key)

    def age(self, now: float) -> None:
        """Time passes."""
        if now >= self._age_at:
            self._age_at = now + EXPECTED_S
            self._known.age()

    def expect(self, request: RequestView, links: Sequence[EngineLink]) -> None:
        """A request goes to these engines."""
        for link in links:
            naming = self._naming(request, link)
            if request.keys is not None and naming is not None:
                self._known.expect(link.key, request.keys(naming))

    def cached(self, request: RequestView, links: Sequence[EngineLink]) -> dict[str, int]:
        """How many tokens of its prompt each of these engines has."""
        if request.keys is None:
            return {}
        alike: dict[BlockNaming, list[str]] = {}
        for link in links:
            naming = self._naming(request, link)
            if naming is not None:
                alike.setdefault(naming, []).append(link.key)
        found: dict[str, int] = {}
        for naming, engines in alike.items():
            lengths = self._known.num_cached(engines, request.keys(naming))
            found.update((key, blocks * naming.block_size) for key, blocks in lengths.items())
        return found

    def _naming(self, request: RequestView, link: EngineLink) -> BlockNaming | None:
        """How the engine names the blocks of a prompt; None: that is not known."""
        if link.description is None:
            return None
        digest = self._known.adapters(link.key).get(request.adapter) if request.adapter else ""
        return None if digest is None else BlockNaming(link.description.block_size, digest)
