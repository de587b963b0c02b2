"""Who is told of an engine's statistics, and the one who writes them to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from diptych_protocol import EngineConfig, SchedulerStats

log = logging.getLogger(__name__)


class StatLogger(Protocol):
    """Belongs to one client."""

    def record(self, stats: SchedulerStats, engine_index: int = 0) -> None:
        """Take an engine's newest statistics: gauges, and totals since its start."""

    def log(self) -> None:
        """Report what is known now."""


StatLoggerFactory = Callable[[EngineConfig, int], StatLogger]
"""Makes the logger of one client, from its configuration and its index."""


class LoggingStatLogger:
    """Writes one line an engine to the log."""

    def __init__(self, config: EngineConfig, client_index: int = 0) -> None:
        self._name = config.engine_id or config.name
        self._stats: dict[str, SchedulerStats] = {}

    def record(self, stats: SchedulerStats, engine_index: int = 0) -> None:
        self._stats[f"{self._name}/{engine_index}"] = stats

    def log(self) -> None:
        log_stats(self._stats)


def log_stats(stats_by_engine: Mapping[str, SchedulerStats]) -> None:
    """One line an engine."""
    for name, stats in stats_by_engine.items():
        log.info(
            "%s: %d running, %d waiting, %d loading, %d of %d blocks held, %d tokens generated",
            name,
            stats.num_running,
            stats.num_waiting,
            stats.num_waiting_for_remote_kv,
            stats.blocks_total - stats.blocks_free,
            stats.blocks_total,
            stats.tokens_generated,
        )
