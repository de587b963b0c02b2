"""Metrics of an LLMEngine's own requests, beside the statistics of its core."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from diptych_frontend.observability.metric_snapshot import Metric, take_snapshot
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol import RequestOutput, SchedulerStats


@dataclass(slots=True)
class RequestFacts:
    """Facts about one open request."""

    num_prompt_tokens: int
    deltas: bool
    """Whether its outputs contain only what is new."""
    started_at: float = field(default_factory=time.perf_counter)
    num_tokens: dict[int, int] = field(default_factory=dict)
    """By the index of the answer."""


class EngineMetrics:
    """A registry of one engine: the metrics of a server without those of HTTP."""

    def __init__(self, model_name: str) -> None:
        self.stats_by_engine: dict[str, SchedulerStats] = {}
        """The newest statistics of the core; to be kept up to date by the owner."""
        stats = self.stats_by_engine
        self._metrics = ServerMetrics(model_name, lambda: stats)

    def saw(self, facts: RequestFacts, output: RequestOutput) -> None:
        """Count what an output adds to its request."""
        metrics, now = self._metrics, time.perf_counter()
        if not facts.num_tokens:
            metrics.prompt_tokens.value += facts.num_prompt_tokens
            metrics.cached_tokens.value += output.num_cached_tokens
            if not output.finished:
                metrics.ttft.observe(now - facts.started_at)
        for answer in output.outputs:
            before = facts.num_tokens.get(answer.index, 0)
            after = len(answer.token_ids) + (before if facts.deltas else 0)
            facts.num_tokens[answer.index] = after
            metrics.generation_tokens.value += after - before
            if answer.finish_reason is not None:
                metrics.count_end(answer.finish_reason)
        if output.finished:
            metrics.e2e.observe(now - facts.started_at)

    def snapshot(self) -> list[Metric]:
        return take_snapshot(self._metrics.registry)
