"""Keeps engines that fail too often out of a router's choice, and tries them with canaries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from diptych_router.engines.engine_link import EngineLink
from diptych_router.engines.engine_table import ROLES
from diptych_router.engines.health_book import Breaker, EngineHealth, Failure, HealthBook
from diptych_router.requests.pools.canary import Release, probe

log = logging.getLogger(__name__)


class HealthWatch:
    """Judges engines by the outcomes of their requests, and decides which are left out."""

    def __init__(
        self,
        links: Mapping[str, EngineLink],
        usable: Callable[[EngineLink], bool],
        *,
        release: Release,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_change: Callable[[], None],
        pairs: bool,
    ) -> None:
        """links: the present engines by their keys. usable: whether an engine may get requests,
        apart from its health. spawn: runs a coroutine in the background. on_change: called when an
        engine may be well again. pairs: see `probe`."""
        self._links, self._usable = links, usable
        self._release, self._spawn, self._on_change = release, spawn, on_change
        self._pairs = pairs
        self.book = HealthBook()

    def of(self, key: str) -> EngineHealth:
        """Return an engine's health. Raises `KeyError` for an unknown address."""
        return self.book.engines[key]

    def went_badly(self, key: str, failure: Failure) -> None:
        """Record that an engine failed at a request and is at fault."""
        link = self._links.get(key)
        if link is not None and self.book.went_badly(key, failure, time.monotonic()):
            log.warning("%s engine %s fails too often (%s)", link.role, link.name, failure)
            self._sort_out()

    # --- what follows -------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Try engines whose breakers have been open for long enough. Call it about every second,
        and when engines come or go."""
        ready = {x.key for x in self._links.values() if x.open_to_work and not x.silent}
        for key in self.book.canaries_due(ready, now):
            breaker = self.of(key).breaker
            breaker.begin_canary()
            self._spawn(self._try(self._links[key], breaker))
        self._sort_out()

    def _sort_out(self) -> None:
        """Leave engines out whose breakers are open, or take them in again."""
        usable = [link for link in self._links.values() if link.up and self._usable(link)]
        pools = ([x.key for x in usable if x.role == role] for role in ROLES)
        left_out = {key for pool in pools for key in self.book.left_out(pool)}
        for link in self._links.values():
            link.keep_out(link.key in left_out)

    async def _try(self, link: EngineLink, breaker: Breaker) -> None:
        error = "it was not finished"
        others = [x for x in self._links.values() if x.open_to_work and not x.is_bad]
        try:
            error = await probe(link, others, self._release, pairs=self._pairs)
        finally:
            breaker.canary_ended(time.monotonic(), ok=not error)
        what = f"fails still: {error}" if error else "is well again"
        log.warning("%s engine %s %s", link.role, link.name, what)
        self._on_change()
