"""Prometheus metrics of one server, under vLLM's names with our prefix where vLLM has them.

There are two sources: what the HTTP server measures of its own requests (`ServerMetrics.track`),
and the snapshots that engines send, which are read at each scrape (`EngineStatsCollector`).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Self

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from diptych_frontend.quotas.ledger import Bill
from diptych_protocol import (
    EngineOverloadedError,
    InvalidRequestError,
    KVTransferStats,
    PoolingRequestOutput,
    RequestOutput,
    SchedulerStats,
)
from diptych_protocol.engine_stats import HAND_OFF_BOUNDS_S, ShownMetric, metrics_of


class Count:
    """A total, in `value`.

    Counters and histograms of `prometheus_client` take a lock and several calls for each value,
    which is a tenth of what a token costs a server. These are for what is counted for every token,
    have no labels, are written by one thread, and are collected like any others.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Times:
    """A histogram: counts values by bucket. See `Count`."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the largest value of each bucket, ascending; one more is for larger ones."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bounds as text, each with the number of values up to it."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Tallies(Collector):
    """Collects counters and histograms, which have the model's name as their only label."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name,)
        self._counts: list[tuple[str, str, Count]] = []
        self._times: list[tuple[str, str, Times]] = []

    def count(self, name: str, meaning: str) -> Count:
        """Add a counter."""
        made = Count()
        self._counts.append((name, meaning, made))
        return made

    def times(self, name: str, meaning: str, bounds: Sequence[float]) -> Times:
        """Add a histogram."""
        made = Times(bounds)
        self._times.append((name, meaning, made))
        return made

    def collect(self) -> Iterator[Family]:
        for name, meaning, count in self._counts:
            counter = CounterMetricFamily(name, meaning, labels=("model_name",))
            counter.add_metric(self._labels, count.value)
            yield counter
        for name, meaning, times in self._times:
            histogram = HistogramMetricFamily(name, meaning, labels=("model_name",))
            histogram.add_metric(self._labels, times.buckets(), times.sum)
            yield histogram


PREFIX = "diptych:"
StatsByEngine = Callable[[], Mapping[str, SchedulerStats]]
"""The newest snapshot of each engine, by the engine's name."""

_TTFT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_ITL_BUCKETS_S = (
    0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_E2E_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


class ServerMetrics:
    """The metrics of one server, in a registry of its own, so that servers do not mix."""

    def __init__(self, model_name: str, stats_by_engine: StatsByEngine | None = None) -> None:
        self.registry = CollectorRegistry()
        self._model_name = self.model_name = model_name
        ProcessCollector(registry=self.registry)
        if stats_by_engine is not None:
            self.registry.register(EngineStatsCollector(model_name, stats_by_engine))
        tallies = Tallies(model_name)
        self.registry.register(tallies)
        self._http_requests = Counter(
            f"{PREFIX}http_requests",
            "HTTP requests by route and status; 499: the client left first.",
            ("model_name", "route", "status"),
            registry=self.registry,
        )
        self._ignored_fields = Counter(
            f"{PREFIX}ignored_fields",
            "Fields of requests that have no effect here and were left out.",
            ("model_name",),
            registry=self.registry,
        ).labels(model_name)
        self._answers: dict[tuple[str, int], Counter] = {}
        """The counters of `_http_requests`, whose labels take longer to look up."""
        self._of_tenants = Counter(
            f"{PREFIX}tenant_requests",
            "HTTP requests that came with an API key, by the key's name and status.",
            ("model_name", "tenant", "status"),
            registry=self.registry,
        )
        self._finished = Counter(
            f"{PREFIX}request_success",
            "Sequences that ended, by reason: stop, length, abort or error.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.prompt_tokens = tallies.count(
            f"{PREFIX}prompt_tokens", "Prompt tokens of served requests."
        )
        self.cached_tokens = tallies.count(
            f"{PREFIX}prompt_tokens_cached",
            "Prompt tokens that a prefix cache had: nobody computed them.",
        )
        self.generation_tokens = tallies.count(f"{PREFIX}generation_tokens", "Tokens generated.")
        self._tenant_tokens = Counter(
            f"{PREFIX}tenant_tokens",
            "Tokens served, by the name of the API key: those of prompts, and generated ones.",
            ("model_name", "tenant", "kind"),
            registry=self.registry,
        )
        self.ttft = tallies.times(
            f"{PREFIX}time_to_first_token_seconds",
            "Streams: arrival to first token.",
            _TTFT_BUCKETS_S,
        )
        self.itl = tallies.times(
            f"{PREFIX}inter_token_latency_seconds",
            "Streams: between two tokens; of several that come together each has its part.",
            _ITL_BUCKETS_S,
        )
        self.loop_lag = tallies.times(
            f"{PREFIX}event_loop_lag_seconds",
            "How late the event loop was, ten times a second.",
            _LAG_BUCKETS_S,
        )
        self.e2e = tallies.times(
            f"{PREFIX}e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS_S
        )

    def count_answer(self, route: str, status: int, tenant: str = "", ignored: int = 0) -> None:
        """Count one HTTP answer; `route` is the route's pattern and `tenant` the name of a key or
        empty, so that labels stay few. `ignored`: the fields of the request without an effect."""
        counter = self._answers.get((route, status))
        if counter is None:
            counter = self._http_requests.labels(self._model_name, route, str(status))
            self._answers[route, status] = counter
        counter.inc()
        if tenant:
            self._of_tenants.labels(self._model_name, tenant, str(status)).inc()
        if ignored:
            self._ignored_fields.inc(ignored)

    def count_end(self, reason: str, sequences: int = 1) -> None:
        self._finished.labels(self._model_name, reason).inc(sequences)

    def tokens_of(self, tenant: str, kind: str) -> Counter:
        """Return a counter of a tenant's tokens of one kind. Tenants are the names of the service's
        keys, so they are few."""
        return self._tenant_tokens.labels(self._model_name, tenant, kind)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics, in the text format that the scraper's Accept header prefers, and its type.

        Raises whatever a collector raises.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class RequestProgress:
    """Measures the times of one prompt. Make it when the prompt is sent to the engine, and call
    `saw` for each output.

    At the end call `ended`, or leave a context of it, which counts how the prompt ended, but not
    requests that were refused before.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        num_prompt_tokens: int,
        tenant: str = "",
        bill: Bill | None = None,
        *,
        goes_on: bool = False,
        deltas: bool = True,
        answers: int = 1,
    ) -> None:
        """num_prompt_tokens: 0 for a prefetch, of which those that are cached count. goes_on: the
        prompt, and the tokens of the first output, were counted when the client asked for the first
        time. deltas: outputs have only the tokens that are new. answers: how many are awaited."""
        self._metrics, self._bill, self._goes_on = metrics, bill, goes_on
        self._num_prompt_tokens = num_prompt_tokens
        self._tenant_prompt_tokens = metrics.tokens_of(tenant, "prompt") if tenant else None
        self._tenant_generation_tokens = metrics.tokens_of(tenant, "generation") if tenant else None
        self._last_delivery: dict[int, float] = {}
        self._num_before: dict[int, int] | None = None if deltas else {}
        """The tokens that earlier outputs had, by the index of the answer."""
        self._seen_any = False
        self._unended = answers
        self._started_at = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def saw(self, output: RequestOutput) -> None:
        metrics = self._metrics
        now = time.perf_counter()
        is_told = self._goes_on and not self._seen_any
        if is_told:
            self._seen_any = True
        elif not self._seen_any:
            self._seen_any = True
            self._count_prompt(output.num_cached_tokens)
            metrics.cached_tokens.value += output.num_cached_tokens
            if not output.finished:
                metrics.ttft.observe(now - self._started_at)
        for choice in output.outputs:
            count = len(choice.token_ids)
            if self._num_before is not None:
                all_so_far, count = count, count - self._num_before.get(choice.index, 0)
                self._num_before[choice.index] = all_so_far
            if count and not is_told:
                metrics.generation_tokens.value += count
                if self._tenant_generation_tokens is not None:
                    self._tenant_generation_tokens.inc(count)
                if self._bill is not None:
                    self._bill.generated += count
                previous = self._last_delivery.get(choice.index)
                if previous is not None:
                    metrics.itl.observe((now - previous) / count, count)
                self._last_delivery[choice.index] = now
            if choice.finish_reason is not None:
                metrics.count_end(choice.finish_reason)
                self._unended -= 1

    def _count_prompt(self, num_cached: int) -> None:
        count = max(self._num_prompt_tokens, num_cached)
        self._metrics.prompt_tokens.value += count
        if self._tenant_prompt_tokens is not None:
            self._tenant_prompt_tokens.inc(count)
        if self._bill is not None:
            self._bill.prompt += count

    def saw_vectors(self, output: PoolingRequestOutput) -> None:
        """Record the one output of a prompt that was pooled."""
        self._count_prompt(output.num_cached_tokens)
        self._metrics.cached_tokens.value += output.num_cached_tokens
        self._metrics.count_end("stop")

    def ended(self) -> None:
        """Record that the prompt has its last output."""
        self._metrics.e2e.observe(time.perf_counter() - self._started_at)

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self._metrics.e2e.observe(time.perf_counter() - self._started_at)
        elif issubclass(exc_type, (GeneratorExit, asyncio.CancelledError)):
            self._metrics.count_end("abort", self._unended)
        elif not issubclass(exc_type, (InvalidRequestError, EngineOverloadedError)):
            self._metrics.count_end("error", self._unended)


_OF_ENGINES: Final = metrics_of(SchedulerStats)
_OF_HINGES: Final = metrics_of(KVTransferStats)


class EngineStatsCollector(Collector):
    """Gauges and totals of each engine, from its newest snapshot at the time of the scrape.

    Totals begin at zero with each start of the engine, as Prometheus expects of counters.
    """

    def __init__(self, model_name: str, stats_by_engine: StatsByEngine) -> None:
        self._model_name = model_name
        self._stats_by_engine = stats_by_engine

    def collect(self) -> Iterator[Family]:
        snapshots = dict(self._stats_by_engine())
        transfers = {
            engine: stats.kv_transfer
            for engine, stats in snapshots.items()
            if stats.kv_transfer is not None
        }
        yield from self._declared(_OF_ENGINES, snapshots)
        yield self._usage(snapshots)
        yield self._info(
            "cpu_level_info",
            "Which of the processor's instructions kernels use: none, avx2, vnni or amx.",
            "level",
            {engine: stats.cpu_level for engine, stats in snapshots.items()},
        )
        yield self._accepted(snapshots)
        if not transfers:
            return
        yield from self._declared(_OF_HINGES, transfers)
        yield self._hand_off_seconds(transfers)
        yield self._info(
            "kv_transfer_transport_info",
            "What the newest connection between two engines uses.",
            "transport",
            {engine: stats.transport for engine, stats in transfers.items()},
        )

    def _declared(
        self, metrics: Mapping[ShownMetric, Mapping[str, str]], stats: Mapping[str, object]
    ) -> Iterator[Family]:
        """The metrics of a struct's fields, of each engine's struct."""
        for metric, fields in metrics.items():
            family_of = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            labels = ("model_name", "engine", *filter(None, [metric.label]))
            family = family_of(PREFIX + metric.name, metric.meaning, labels=labels)
            for engine, told in stats.items():
                for value, field in fields.items():
                    own = (self._model_name, engine, *filter(None, [value]))
                    family.add_metric(own, getattr(told, field))
            yield family

    def _usage(self, snapshots: Mapping[str, SchedulerStats]) -> Family:
        family = GaugeMetricFamily(
            f"{PREFIX}kv_cache_usage_perc",
            "Share of KV blocks in use; 1 means all.",
            labels=("model_name", "engine"),
        )
        for engine, stats in snapshots.items():
            free = stats.blocks_free / stats.blocks_total if stats.blocks_total else 1.0
            family.add_metric((self._model_name, engine), 1.0 - free)
        return family

    def _hand_off_seconds(self, transfers: Mapping[str, KVTransferStats]) -> Family:
        family = HistogramMetricFamily(
            f"{PREFIX}kv_transfer_hand_off_seconds",
            "How long requests waited for their blocks, up to the validated close.",
            labels=("model_name", "engine"),
        )
        bounds = [*map(str, HAND_OFF_BOUNDS_S), "+Inf"]
        for engine, stats in transfers.items():
            counts = stats.hand_off_counts or [0] * len(bounds)
            buckets = list(zip(bounds, accumulate(counts), strict=False))
            family.add_metric((self._model_name, engine), buckets, stats.seconds_receiving)
        return family

    def _info(self, name: str, meaning: str, label: str, words: Mapping[str, str]) -> Family:
        """A word of each engine that has one, as a label."""
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=("model_name", "engine", label))
        for engine, word in words.items():
            if word:
                family.add_metric((self._model_name, engine, word), 1.0)
        return family

    def _accepted(self, snapshots: Mapping[str, SchedulerStats]) -> Family:
        family = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place among the guesses of a step.",
            labels=("model_name", "engine", "position"),
        )
        for engine, stats in snapshots.items():
            for position, count in enumerate(stats.accepted_at):
                family.add_metric((self._model_name, engine, str(position)), count)
        return family
