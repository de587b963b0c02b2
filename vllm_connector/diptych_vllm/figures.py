"""Counts transfers for vLLM's `/metrics`.

vLLM adds up what a connector reports after each step, so both halves report how much their totals
have grown since the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from diptych_protocol import KVTransferStats

OF_HINGE: Final[Mapping[str, str]] = {
    "blocks_received": "Blocks that other engines' KV has filled, of loads that were confirmed",
    "bytes_received": "Bytes of these blocks",
    "blocks_sent": "Blocks that other engines have read",
    "bytes_sent": "Bytes of these blocks",
    "loads_completed": "Loads of other engines' KV that were confirmed",
    "loads_failed": "Loads of other engines' KV that failed or were given up",
    "leases_granted": "Leases of this engine's blocks",
    "leases_released": "Leases that ended because their blocks were read or not wanted",
    "leases_revoked": "Leases that this engine ended, because it was told so or forgot its KV",
    "leases_expired": "Leases that nobody renewed",
    "stale_reads_refused": "Reads that began under a lease that had ended",
}
"""Name -> meaning of the totals of each worker's hinge."""
OF_SCHEDULER: Final[Mapping[str, str]] = {
    "references_refused": "Requests that failed because their references were not good",
    "reports_dropped": "Reports of the workers that nobody waited for",
}
"""Name -> meaning of the totals of the scheduler half."""
FIGURES: Final[Mapping[str, str]] = {**OF_HINGE, **OF_SCHEDULER}


def totals_of(stats: KVTransferStats) -> dict[str, int]:
    """Return the totals of a worker's hinge since its start."""
    return {name: getattr(stats, name) for name in OF_HINGE}


@dataclass(slots=True)
class Growth:
    """Remembers totals, and computes how much they have grown."""

    _told: dict[str, int] = field(default_factory=dict)

    def of(self, totals: dict[str, int]) -> dict[str, int]:
        """Return how much each total has grown since the last call, without those that have not."""
        if totals == self._told:
            return {}
        told, self._told = self._told, totals
        grown = {name: total - told.get(name, 0) for name, total in totals.items()}
        return {name: number for name, number in grown.items() if number}


def add(figures: dict[str, int], more: Mapping[str, int]) -> None:
    """Add figures of another step or another rank."""
    for name, number in more.items():
        figures[name] = figures.get(name, 0) + number
