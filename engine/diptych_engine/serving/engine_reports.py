"""Reports an LLMEngine's statistics: to its metrics, to receivers, and to the log."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from diptych_engine.serving.engine_controls import EngineControls
from diptych_engine.serving.engine_metrics import EngineMetrics
from diptych_frontend.observability.metric_snapshot import Metric
from diptych_frontend.observability.stat_loggers import StatLoggerManager
from diptych_protocol import (
    EngineCoreOutputs,
    EngineDescription,
    InvalidRequestError,
    SchedulerStats,
)
from diptych_protocol.errors import NotKeptError

if TYPE_CHECKING:
    from diptych_frontend.observability.request_tracer import RequestTracer

LOG_INTERVAL = "DIPTYCH_LOG_STATS_INTERVAL"
"""Environment variable: seconds between two lines of statistics."""
DEFAULT_LOG_INTERVAL_S = 10.0


def log_interval_s() -> float:
    """Return the present value of the environment variable. Raises `InvalidRequestError` if it is
    not a number."""
    text = os.environ.get(LOG_INTERVAL)
    try:
        return DEFAULT_LOG_INTERVAL_S if text is None else float(text)
    except ValueError as exc:
        raise InvalidRequestError(
            f"{LOG_INTERVAL} is a number of seconds, not {text!r}", param=LOG_INTERVAL
        ) from exc


class EngineReports(EngineControls):
    """Mixed into an engine that has a core, and keeps statistics if it is asked to."""

    log_stats: bool
    logger_manager: StatLoggerManager | None
    """None without `log_stats`."""
    description: EngineDescription
    _metrics: EngineMetrics
    _tracer: RequestTracer | None
    _clock: Callable[[], float]
    """Seconds; tells when statistics are due in the log."""
    _last_log_time: float | None = None
    """None before the first question whether they are."""

    def get_metrics(self) -> list[Metric]:
        """Return the present values of all metrics. Raises `NotKeptError` without `log_stats`."""
        if not self.log_stats:
            raise NotKeptError("this engine keeps no statistics: log_stats is False")
        self._metrics.stats_by_engine[self.description.engine_id] = self._fetch_stats()
        return self._metrics.snapshot()

    def do_log_stats(self) -> None:
        """Pass the statistics to every logger, and let it report; does nothing
        without `log_stats`."""
        if self.logger_manager is not None:
            self.logger_manager.record(self._fetch_stats(), None)
            self.logger_manager.log()

    def do_log_stats_with_interval(self) -> None:
        """Do the same, if the interval has passed since the last time, or since the first call."""
        now = self._clock()
        if self._last_log_time is None:
            self._last_log_time = now
        if now - self._last_log_time >= log_interval_s():
            self.do_log_stats()
            self._last_log_time = now

    def _record(self, message: EngineCoreOutputs, stopped: Sequence[str]) -> None:
        """Tell the tracer and the receivers of statistics what came."""
        if self._tracer is not None:
            self._tracer.take(message)
            self._tracer.stopped(stopped)
        if self.logger_manager is None or not message.outputs:
            return
        if message.scheduler_stats is None and self.logger_manager.wants_iterations:
            message.scheduler_stats = self._fetch_stats()
        self.logger_manager.take(message, stopped)
        self.do_log_stats_with_interval()

    def _fetch_stats(self) -> SchedulerStats:
        return msgspec.convert(self.call_core("stats"), SchedulerStats)
