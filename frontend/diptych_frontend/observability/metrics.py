"""Prometheus metrics of one server, under vLLM's names with our prefix where vLLM has them.

There are two sources: what the HTTP server measures of its own requests (`ServerMetrics.track`),
and the snapshots that engines send, which are read at each scrape (`EngineStatsCollector`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from diptych_frontend.observability.tallies import Tallies
from diptych_protocol import (
    EngineOverloadedError,
    InvalidRequestError,
    KVTransferStats,
    PoolingRequestOutput,
    RequestOutput,
    SchedulerStats,
)
from diptych_protocol.wire import HAND_OFF_BOUNDS_S

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
            "Streams: between two deliveries.",
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

    def count_answer(self, route: str, status: int, tenant: str = "") -> None:
        """Count one HTTP answer; `route` is the route's pattern and `tenant` the name of a key or
        empty, so that labels stay few."""
        counter = self._answers.get((route, status))
        if counter is None:
            counter = self._http_requests.labels(self._model_name, route, str(status))
            self._answers[route, status] = counter
        counter.inc()
        if tenant:
            self._of_tenants.labels(self._model_name, tenant, str(status)).inc()

    def count_end(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def track(self, num_prompt_tokens: int, tenant: str = "") -> RequestProgress:
        """Follow one prompt through the engine; see `RequestProgress`."""
        return RequestProgress(self, num_prompt_tokens, tenant)

    def tokens_of(self, tenant: str, kind: str) -> Counter | None:
        """Return a counter of a tenant's tokens of one kind; None for requests without an API key.
        Tenants are the names of the service's keys, so they are few."""
        return self._tenant_tokens.labels(self._model_name, tenant, kind) if tenant else None

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics, in the text format that the scraper's Accept header prefers, and its type.

        Raises whatever a collector raises.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class RequestProgress:
    """Measures the times of one prompt. Enter it when the prompt is sent to the engine, and call
    `saw` for each output.

    On exit it counts how the prompt ended; it does not count requests that were refused before they
    ran.
    """

    def __init__(self, metrics: ServerMetrics, num_prompt_tokens: int, tenant: str) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._tenant_prompt_tokens = metrics.tokens_of(tenant, "prompt")
        self._tenant_generation_tokens = metrics.tokens_of(tenant, "generation")
        self._last_delivery: dict[int, float] = {}
        self._seen_any = False

    def __enter__(self) -> Self:
        self._started_at = time.perf_counter()
        return self

    def saw(self, output: RequestOutput) -> None:
        metrics = self._metrics
        now = time.perf_counter()
        if not self._seen_any:
            self._seen_any = True
            self._count_prompt()
            metrics.cached_tokens.inc(output.num_cached_tokens)
            if not output.finished:
                metrics.ttft.observe(now - self._started_at)
        for choice in output.outputs:
            if choice.token_ids:
                metrics.generation_tokens.inc(len(choice.token_ids))
                if self._tenant_generation_tokens is not None:
                    self._tenant_generation_tokens.inc(len(choice.token_ids))
                previous = self._last_delivery.get(choice.index)
                if previous is not None:
                    metrics.itl.observe(now - previous)
                self._last_delivery[choice.index] = now
            if choice.finish_reason is not None:
                metrics.count_end(choice.finish_reason)

    def _count_prompt(self) -> None:
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
        if self._tenant_prompt_tokens is not None:
            self._tenant_prompt_tokens.inc(self._num_prompt_tokens)

    def saw_vectors(self, output: PoolingRequestOutput) -> None:
        """Record the one output of a prompt that was pooled."""
        self._count_prompt()
        self._metrics.cached_tokens.inc(output.num_cached_tokens)
        self._metrics.count_end("stop")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self._metrics.e2e.observe(time.perf_counter() - self._started_at)
        elif issubclass(exc_type, (GeneratorExit, asyncio.CancelledError)):
            self._metrics.count_end("abort")
        elif not issubclass(exc_type, (InvalidRequestError, EngineOverloadedError)):
            self._metrics.count_end("error")


_Engine = Callable[[SchedulerStats], float]
_Transfer = Callable[[KVTransferStats], float]


def _usage(stats: SchedulerStats) -> float:
    return 1.0 - stats.blocks_free / stats.blocks_total if stats.blocks_total else 0.0


_ENGINE_GAUGES: tuple[tuple[str, str, _Engine], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests waiting to run.", lambda s: s.num_waiting),
    ("num_requests_waiting_for_remote_kv", "Requests waiting for blocks from another engine.",
     lambda s: s.num_waiting_for_remote_kv),
    ("num_requests_waiting_for_input", "Requests waiting for the next piece of their prompt.",
     lambda s: s.num_waiting_for_input),
    ("kv_cache_usage_perc", "Share of KV blocks in use; 1 means all.", _usage),
    ("kv_cache_blocks", "KV blocks of the engine.", lambda s: s.blocks_total),
    ("kv_cache_blocks_free", "KV blocks that no request and no lease holds.",
     lambda s: s.blocks_free),
    ("queued_prompt_tokens", "Prompt tokens that steps have yet to compute.",
     lambda s: s.queued_prompt_tokens),
    ("engine_draining", "1 while the engine is about to leave.", lambda s: s.draining),
    ("engine_paused", "1 while new requests wait for the end of a pause.", lambda s: s.paused),
    ("engine_sleep_level",
     "1: without KV cache, weights put aside; 2: without weights; 0: awake, or only paused.",
     lambda s: s.sleep_level),
    ("cpu_kernels_set_aside", "Kernels wrong at start, or not to be had; torch computes instead.",
     lambda s: s.cpu_kernels_set_aside),
)  # fmt: skip

_ENGINE_COUNTERS: tuple[tuple[str, str, _Engine], ...] = (
    ("engine_prompt_tokens_computed", "Prompt tokens computed.",
     lambda s: s.prompt_tokens_computed),
    ("engine_tokens_generated", "Tokens sampled.", lambda s: s.tokens_generated),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
     lambda s: s.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.",
     lambda s: s.prefix_cache_hits),
    ("external_prefix_cache_hits", "Prompt tokens whose KV came from another engine.",
     lambda s: s.remote_kv_tokens),
    ("num_preemptions", "Requests that lost their blocks to another.",
     lambda s: s.num_preemptions),
    ("engine_steps", "Steps of the engine; stands still when it does.", lambda s: s.steps),
    ("malformed_messages", "Messages of clients that the engine could not read.",
     lambda s: s.malformed_messages),
    ("images_encoded", "Images that the vision tower computed.", lambda s: s.images_encoded),
    ("encoder_cache_hits", "Images needed again whose features were kept.",
     lambda s: s.encoder_cache_hits),
)  # fmt: skip

_TRANSFER_GAUGES: tuple[tuple[str, str, _Transfer], ...] = (
    ("kv_transfer_leases_held", "Leases now granted or being read.", lambda k: k.leases_held),
    ("kv_transfer_leases_promised_now", "Leases of prompts that are still computed.",
     lambda k: k.leases_promised_now),
    ("kv_transfer_leases_draining", "Leases that have ended, whose blocks are still being sent.",
     lambda k: k.leases_draining),
    ("kv_transfer_blocks_held", "KV blocks pinned by leases.", lambda k: k.blocks_held),
    ("kv_transfer_loads_in_flight", "Requests whose blocks are on their way.",
     lambda k: k.loads_in_flight),
    ("kv_transfer_early_loads_now", "Loads for requests that are only announced.",
     lambda k: k.early_loads_now),
    ("kv_transfer_loads_waiting_for_room", "Loads of another geometry that cannot begin yet.",
     lambda k: k.loads_waiting_for_room),
    ("kv_transfer_staging_bytes", "Bytes reserved for KV that is to be repacked.",
     lambda k: k.staging_bytes),
    ("kv_transfer_prefix_fetches_now", "Prefixes that are on their way.",
     lambda k: k.prefix_fetches_now),
)  # fmt: skip

_TRANSFER_COUNTERS: tuple[tuple[str, str, _Transfer], ...] = (
    ("kv_transfer_blocks_received", "KV blocks received.", lambda k: k.blocks_received),
    ("kv_transfer_blocks_sent", "KV blocks sent.", lambda k: k.blocks_sent),
    ("kv_transfer_bytes_received", "Bytes of KV received.", lambda k: k.bytes_received),
    ("kv_transfer_bytes_sent", "Bytes of KV sent.", lambda k: k.bytes_sent),
    ("kv_transfer_receive_seconds", "Sum over loads, from the open to the validated close.",
     lambda k: k.seconds_receiving),
    ("kv_transfer_stale_reads_refused", "Reads that were not validated, so not used.",
     lambda k: k.stale_reads_refused),
    ("kv_transfer_loads_started", "Loads that were begun.", lambda k: k.loads_started),
    ("kv_transfer_rejections_received", "Leases that ended because nobody wanted them.",
     lambda k: k.leases_rejected),
    ("kv_transfer_rejections_sent", "Times that another engine was told so.",
     lambda k: k.leases_refused_here),
    ("kv_transfer_rejections_ignored", "Times that a report of a refused request named no lease.",
     lambda k: k.rejections_ignored),
    ("kv_transfer_prefix_tokens_fetched", "Prompt tokens whose KV another engine remembered.",
     lambda k: k.prefix_tokens_fetched),
    ("kv_transfer_prefix_seconds", "Sum of the time that requests waited for fetched prefixes.",
     lambda k: k.prefix_seconds),
)  # fmt: skip

_LEASE_STATES: tuple[tuple[str, _Transfer], ...] = (
    ("promised", lambda k: k.leases_promised),
    ("withdrawn", lambda k: k.leases_withdrawn),
    ("granted", lambda k: k.leases_granted),
    ("released", lambda k: k.leases_released),
    ("revoked", lambda k: k.leases_revoked),
    ("expired", lambda k: k.leases_expired),
)
_EARLY_LOADS: tuple[tuple[str, _Transfer], ...] = (
    ("begun", lambda k: k.early_loads),
    ("adopted", lambda k: k.early_loads_adopted),
    ("dropped", lambda k: k.early_loads_dropped),
)
_PREFIX_FETCHES: tuple[tuple[str, _Transfer], ...] = (
    ("asked", lambda k: k.prefix_fetches),
    ("fetched", lambda k: k.prefix_fetches_completed),
    ("computed", lambda k: k.prefix_fetches_failed),
)
_PREFIXES_ASKED: tuple[tuple[str, _Transfer], ...] = (
    ("lent", lambda k: k.prefixes_lent),
    ("refused", lambda k: k.prefixes_refused),
)
_LOAD_OUTCOMES: tuple[tuple[str, _Transfer], ...] = (
    ("completed", lambda k: k.loads_completed),
    ("failed", lambda k: k.loads_failed),
)


class EngineStatsCollector(Collector):
    """Gauges and totals of each engine, from its newest snapshot at the time of the scrape.

    Totals begin at zero with each start of the engine, as Prometheus expects of counters.
    """

    def __init__(self, model_name: str, stats_by_engine: StatsByEngine) -> None:
        self._model_name = model_name
        self._stats_by_engine = stats_by_engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        snapshots = dict(self._stats_by_engine())
        transfers = {
            engine: stats.kv_transfer
            for engine, stats in snapshots.items()
            if stats.kv_transfer is not None
        }
        for name, meaning, read in _ENGINE_GAUGES:
            yield self._gauge(name, meaning, {e: read(s) for e, s in snapshots.items()})
        for name, meaning, read in _ENGINE_COUNTERS:
            yield self._counter(name, meaning, {e: read(s) for e, s in snapshots.items()})
        yield self._cpu_levels(snapshots)
        if not transfers:
            return
        for name, meaning, of in _TRANSFER_GAUGES:
            yield self._gauge(name, meaning, {e: of(k) for e, k in transfers.items()})
        for name, meaning, of in _TRANSFER_COUNTERS:
            yield self._counter(name, meaning, {e: of(k) for e, k in transfers.items()})
        yield self._split(
            "kv_transfer_leases", "Leases by the states they reached.", "state",
            _LEASE_STATES, transfers,
        )  # fmt: skip
        yield self._split(
            "kv_transfer_loads", "Loads by outcome.", "outcome", _LOAD_OUTCOMES, transfers
        )
        yield self._split(
            "kv_transfer_early_loads", "Loads for requests that were only announced.", "state",
            _EARLY_LOADS, transfers,
        )  # fmt: skip
        yield self._split(
            "kv_transfer_prefix_fetches", "Prefixes to be fetched, and what became of them.",
            "state", _PREFIX_FETCHES, transfers,
        )  # fmt: skip
        yield self._split(
            "kv_transfer_prefixes", "Prefixes that other engines asked for.", "answer",
            _PREFIXES_ASKED, transfers,
        )  # fmt: skip
        yield self._hand_off_seconds(transfers)
        yield self._transports(transfers)

    def _gauge(self, name: str, meaning: str, by_engine: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=("model_name", "engine"))
        for engine, value in by_engine.items():
            family.add_metric((self._model_name, engine), value)
        return family

    def _counter(self, name: str, meaning: str, by_engine: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, meaning, labels=("model_name", "engine"))
        for engine, value in by_engine.items():
            family.add_metric((self._model_name, engine), value)
        return family

    def _split(
        self,
        name: str,
        meaning: str,
        label: str,
        parts: tuple[tuple[str, _Transfer], ...],
        transfers: Mapping[str, KVTransferStats],
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, meaning, labels=("model_name", "engine", label))
        for engine, stats in transfers.items():
            for part, read in parts:
                family.add_metric((self._model_name, engine, part), read(stats))
        return family

    def _hand_off_seconds(self, transfers: Mapping[str, KVTransferStats]) -> Metric:
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

    def _cpu_levels(self, snapshots: Mapping[str, SchedulerStats]) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}cpu_level_info",
            "Which of the processor's instructions kernels use: none, avx2, vnni or amx.",
            labels=("model_name", "engine", "level"),
        )
        for engine, stats in snapshots.items():
            if stats.cpu_level:
                family.add_metric((self._model_name, engine, stats.cpu_level), 1.0)
        return family

    def _transports(self, transfers: Mapping[str, KVTransferStats]) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}kv_transfer_transport_info",
            "What the newest connection between two engines uses.",
            labels=("model_name", "engine", "transport"),
        )
        for engine, stats in transfers.items():
            if stats.transport:
                family.add_metric((self._model_name, engine, stats.transport), 1.0)
        return family
