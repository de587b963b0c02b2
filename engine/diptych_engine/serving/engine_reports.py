"""What an LLMEngine has beside requests: blocking control calls, which correspond to those of
AsyncLLM, and reports of its statistics to its metrics, to receivers, and to the log."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from diptych_frontend.core_client.foreign_options import importable_name
from diptych_frontend.observability.metric_snapshot import Metric, take_snapshot
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.observability.stat_loggers import StatLoggerManager
from diptych_protocol import (
    ControlCall,
    EngineConfig,
    EngineCoreOutputs,
    EngineDescription,
    InvalidRequestError,
    SchedulerStats,
    UnsupportedFeatureError,
)
from diptych_protocol.control_calls import (
    APPLY_MODEL,
    CALL_FUNCTION,
    CALL_TIMEOUT_S,
    REST_TIMEOUT_S,
    BlockingCalls,
)
from diptych_protocol.errors import NotKeptError

if TYPE_CHECKING:
    from diptych_engine.models import CausalLM
    from diptych_frontend.observability.request_tracer import RequestTracer

T = TypeVar("T")


class EngineControls(BlockingCalls):
    """A mixin for an engine that has a core. Every method raises `UtilityError` if the core refuses
    or fails, `TimeoutError` if it takes too long, and `EngineDeadError` if it has ended."""

    vllm_config: EngineConfig
    """The engine's settings."""

    @abstractmethod
    def call_core(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Make a utility call."""

    def control(self, call: ControlCall[Any]) -> Any:
        return self.call_core(call.METHOD, *call.arguments, timeout_s=call.timeout_s)

    @property
    @abstractmethod
    def only_worker(self) -> Any:
        """The runner of the whole model, if it is in this process; otherwise None."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method or a function of every worker; return the results in the order of their
        ranks. A function must be importable, and `allow_functions` set, unless the only worker is
        in this process. The method `apply_model` with a function does the same as `apply_model`."""
        if method == APPLY_MODEL and args and callable(args[0]):
            return self.apply_model(*args, **(kwargs or {}))
        if callable(method):
            if self.only_worker is not None:
                return [method(self.only_worker, *args, **(kwargs or {}))]
            args = (self._name_of(method, "method"), *args)
            method = CALL_FUNCTION
        wait_s = REST_TIMEOUT_S if timeout is None else timeout
        results = self.call_core(
            "collective_rpc", method, list(args), kwargs or {}, timeout_s=wait_s
        )
        return list(results)

    def apply_model(self, func: Callable[[CausalLM], T]) -> list[T]:
        """Call a function with every worker's model, as `collective_rpc` does with the worker."""
        if self.only_worker is not None:
            return [func(self.only_worker.model)]
        return self.collective_rpc(APPLY_MODEL, args=(self._name_of(func, "func"),))

    def _name_of(self, function: Callable[..., Any], param: str) -> str:
        if not self.vllm_config.allow_functions:
            raise UnsupportedFeatureError(
                f"{param} can be a function only where the whole model is in this process, or with "
                "allow_functions=True in the engine's settings"
            )
        return importable_name(function, param)


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
    _metrics: ServerMetrics
    """The metrics of a server without those of HTTP."""
    _newest_stats: dict[str, SchedulerStats]
    """Those of the core, by its name, as the metrics show them."""
    _tracer: RequestTracer | None
    _clock: Callable[[], float]
    """Seconds; tells when statistics are due in the log."""
    _last_log_time: float | None = None
    """None before the first question whether they are."""

    def get_metrics(self) -> list[Metric]:
        """Return the present values of all metrics. Raises `NotKeptError` without `log_stats`."""
        if not self.log_stats:
            raise NotKeptError("this engine keeps no statistics: log_stats is False")
        self._newest_stats[self.description.engine_id] = self._fetch_stats()
        return take_snapshot(self._metrics.registry)

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
