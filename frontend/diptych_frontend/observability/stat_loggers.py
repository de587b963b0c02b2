"""Receivers of an engine's statistics: one that writes to the log, and those that users add."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych_protocol import (
    ControlCall,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    MultiModalCacheStats,
    SchedulerStats,
)
from diptych_protocol.control_calls import Sleep, WakeUp


@dataclass(slots=True)
class FinishedRequestStats:
    """One request that ended, or one of the n answers to it."""

    finish_reason: FinishReason
    e2e_latency: float
    """Seconds from its arrival here to its last output."""
    num_prompt_tokens: int
    num_generation_tokens: int


@dataclass(slots=True)
class IterationStats:
    """The statistics of one message, named as in vLLM's class. Times are in seconds."""

    iteration_timestamp: float = field(default_factory=time.time)
    num_prompt_tokens: int = 0
    """Prompt tokens of the requests that had their first output."""
    num_generation_tokens: int = 0
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    """The time since the request's last output, for each request that had an earlier one."""
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    request: EngineCoreRequest
    arrived_at: float
    spoke_at: float | None = None
    num_tokens: int = 0


class IterationWatch:
    """Follows the open requests of one front-end. One thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def begin(self, request: EngineCoreRequest) -> None:
        """Record that a request was sent."""
        self._open[request.request_id] = _Open(request, self._clock())

    def ended(self, request_ids: Iterable[str]) -> None:
        """Record requests that ended here, by a stop string or because nobody waits any more."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def take(self, message: EngineCoreOutputs) -> IterationStats:
        """Return the statistics of a message of the core."""
        stats, now = IterationStats(), self._clock()
        for output in message.outputs:
            known = self._open.get(output.request_id)
            if known is None:
                continue
            if output.new_token_ids:
                self._count(stats, known, len(output.new_token_ids), now)
            if output.finish_reason is not None:
                del self._open[output.request_id]
                stats.finished_requests.append(_finished(known, output.finish_reason, now))
        return stats

    def stopped(self, stats: IterationStats, request_ids: Iterable[str]) -> None:
        """Count requests of a message that ended by a stop string."""
        for request_id in request_ids:
            known = self._open.pop(request_id, None)
            if known is not None:
                now = self._clock()
                stats.finished_requests.append(_finished(known, FinishReason.STOP, now))

    def _count(self, stats: IterationStats, known: _Open, num_tokens: int, now: float) -> None:
        if known.spoke_at is None:
            stats.num_prompt_tokens += len(known.request.prompt_token_ids or ())
            stats.time_to_first_tokens_iter.append(now - known.arrived_at)
        else:
            stats.inter_token_latencies_iter.append(now - known.spoke_at)
        known.spoke_at = now
        known.num_tokens += num_tokens
        stats.num_generation_tokens += num_tokens


def _finished(known: _Open, reason: FinishReason, now: float) -> FinishedRequestStats:
    num_prompt = len(known.request.prompt_token_ids or ())
    return FinishedRequestStats(reason, now - known.arrived_at, num_prompt, known.num_tokens)


log = logging.getLogger(__name__)


class StatLogger(ABC):
    """Receives the statistics of the engine cores behind one client."""

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Record the statistics of one message of a core; either part may be missing.

        scheduler_stats: gauges, and totals since the core's start.

        mm_cache_stats: counts of the cache of images, for a model that takes images.

        engine_idx: the core's rank.
        """

    @abstractmethod
    def log(self) -> None:
        """Report the present statistics."""

    def log_engine_initialized(self) -> None:  # noqa: B027  (few have something to say)
        """Note that the engine can serve."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:  # noqa: B027
        """Note that the engine went to sleep (1), to this level, or woke up (0)."""


StatLoggerFactory = Callable[[EngineConfig, int], StatLogger]
"""Creates the receiver of one client, from its configuration and its index."""


class LoggingStatLogger(StatLogger):
    """Writes one line per engine core to the log, or one line for all."""

    def __init__(self, config: EngineConfig, client_index: int = 0) -> None:
        self._name = config.engine_id or config.name
        self._stats: dict[str, SchedulerStats] = {}
        self.aggregate = False
        """One line for all cores together."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._stats[f"{self._name}/{engine_idx}"] = scheduler_stats

    def log(self) -> None:
        log_stats({self._name: _sum(self._stats.values())} if self.aggregate else self._stats)

    def log_engine_initialized(self) -> None:
        log.info("%s: the engine can serve", self._name)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        log.info("%s: %s", self._name, f"asleep, level {level}" if sleep else "awake")


class StatLoggerManager:
    """Passes everything to each receiver of one client, by the methods of `StatLogger`."""

    def __init__(
        self,
        config: EngineConfig,
        factories: Sequence[StatLoggerFactory],
        client_index: int = 0,
        *,
        aggregate: bool = False,
        stat_mm_cache: Callable[[], MultiModalCacheStats | None] = lambda: None,
    ) -> None:
        """`factories`: the users' receivers; a `LoggingStatLogger` is always added.

        stat_mm_cache: returns the renderer's counts of images.
        """
        self._stat_mm_cache = stat_mm_cache
        own = LoggingStatLogger(config, client_index)
        own.aggregate = aggregate
        self.stat_loggers: list[StatLogger] = [own]
        self.stat_loggers += [make(config, client_index) for make in factories]
        self._watch = IterationWatch() if factories else None
        """Only users' receivers want to know of each message."""

    @property
    def wants_iterations(self) -> bool:
        """Whether `take` uses messages that carry no statistics of a core."""
        return self._watch is not None

    def begin(self, request: EngineCoreRequest) -> None:
        """Record that a request was sent."""
        if self._watch is not None:
            self._watch.begin(request)

    def ended(self, request_ids: Iterable[str]) -> None:
        """Record requests that nobody waits for any more."""
        if self._watch is not None:
            self._watch.ended(request_ids)

    def take(self, message: EngineCoreOutputs, stopped: Iterable[str]) -> None:
        """Record a message of a core. A stop string ended its requests in `stopped`."""
        iteration = None
        if self._watch is not None and message.outputs:
            iteration = self._watch.take(message)
            self._watch.stopped(iteration, stopped)
        if iteration is not None or message.scheduler_stats is not None:
            self.record(
                message.scheduler_stats,
                iteration,
                self._stat_mm_cache(),
                engine_idx=message.engine_index,
            )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        for receiver in self.stat_loggers:
            receiver.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def carried_out(self, call: ControlCall[Any]) -> None:
        """Record a control call: receivers want to know whether the engine sleeps."""
        match call:
            case Sleep(level):
                self.record_sleep_state(1, level)
            case WakeUp():
                self.record_sleep_state(0, 0)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        for receiver in self.stat_loggers:
            receiver.record_sleep_state(sleep, level)

    def log(self) -> None:
        for receiver in self.stat_loggers:
            receiver.log()

    def log_engine_initialized(self) -> None:
        for receiver in self.stat_loggers:
            receiver.log_engine_initialized()


def log_stats(stats_by_engine: Mapping[str, SchedulerStats]) -> None:
    """Write one line per engine."""
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


def _sum(all_stats: Iterable[SchedulerStats]) -> SchedulerStats:
    """What `log_stats` shows, of all of them together."""
    total = SchedulerStats()
    for stats in all_stats:
        for name in (
            "num_running", "num_waiting", "num_waiting_for_remote_kv", "blocks_total",
            "blocks_free", "tokens_generated",
        ):  # fmt: skip
            setattr(total, name, getattr(total, name) + getattr(stats, name))
    return total
