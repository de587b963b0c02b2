"""A receiver of statistics that keeps what it gets.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from typing import ClassVar

from diptych_frontend.observability.stat_loggers import IterationStats, StatLogger
from diptych_protocol import EngineConfig, MultiModalCacheStats, SchedulerStats


class RecordingLogger(StatLogger):
    made: ClassVar[list[RecordingLogger]] = []

    def __init__(self, config: EngineConfig, client_index: int) -> None:
        self.config = config
        self.recorded: list[SchedulerStats] = []
        self.iterations: list[IterationStats] = []
        self.images: list[MultiModalCacheStats] = []
        self.engines: set[int] = set()
        self.sleeps: list[tuple[int, int]] = []
        self.logged = self.initialized = 0
        self.made.append(self)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        self.engines.add(engine_idx)
        if mm_cache_stats is not None:
            self.images.append(mm_cache_stats)
        if scheduler_stats is not None:
            self.recorded.append(scheduler_stats)
        if iteration_stats is not None:
            self.iterations.append(iteration_stats)

    def log(self) -> None:
        self.logged += 1

    def log_engine_initialized(self) -> None:
        self.initialized += 1

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        self.sleeps.append((sleep, level))
