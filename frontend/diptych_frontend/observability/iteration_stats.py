"""Statistics of each message of an engine core, for receivers of statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from diptych_protocol import EngineCoreOutputs, EngineCoreRequest, FinishReason


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
