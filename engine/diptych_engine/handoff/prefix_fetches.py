"""Counts the outcomes of fetching prefixes from other engines."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from diptych_engine.scheduling.request import LoadOrder
from diptych_kv_transfer import LoadEnded
from diptych_protocol import KVTransferStats

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefixFetches:
    """Follows each fetch to its end. None of them fails its request: what does not arrive is
    computed."""

    begun: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    """Tokens that completed fetches brought, and that were not here already."""
    _under_way: dict[str, int] = field(default_factory=dict)
    """Request id -> how many tokens of its prompt were here."""

    def start(self, order: LoadOrder) -> None:
        """A fetch begins."""
        self.begun += 1
        self._under_way[order.request_id] = order.num_here

    def refused(self, request_id: str, why: str) -> None:
        """Record a fetch that does not even begin."""
        self.begun += 1
        self.failed += 1
        log.warning("request %s: its prefix is computed, not fetched: %s", request_id, why)

    def ended(self, event: LoadEnded) -> bool:
        """Record the end of a load. Returns whether it has brought a part of a prefix."""
        num_here = self._under_way.pop(event.request_id, None)
        if num_here is None:
            return False
        if event.ok:
            self.completed += 1
            self.tokens += event.num_tokens - num_here
        else:
            self.failed += 1
            log.info("request %s: its prefix was not fetched: %s", event.request_id, event.reason)
        return event.ok

    def count(self, stats: KVTransferStats) -> None:
        """Write the totals into statistics."""
        stats.prefix_fetches, stats.prefix_fetches_completed = self.begun, self.completed
        stats.prefix_fetches_failed, stats.prefix_tokens_fetched = self.failed, self.tokens
