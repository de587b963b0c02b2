"""The operator's metrics about itself and its services, and the HTTP port that shows them and
answers the kubelet's probes."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from diptych_operator.api.base import ServiceKey
from diptych_operator.api.status import Status
from diptych_operator.status.reasons import ConditionType, Reason

PREFIX = "diptych_operator_"
_UNWELL = {
    str(ConditionType.AVAILABLE): ("False", "Unknown"),
    str(ConditionType.KV_TRANSFER_VERIFIED): ("False",),
}
_PASS_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics(Collector):
    """The metrics, in a registry of their own; nothing is registered globally."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._passes = Counter(
            f"{PREFIX}reconcile", "Passes over services, by result: done or failed.", ("result",),
            registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            f"{PREFIX}reconcile_seconds", "Time of a pass.", buckets=_PASS_BUCKETS_S,
            registry=self.registry,
        )  # fmt: skip
        self.leader = Gauge(
            f"{PREFIX}leader", "1 while this process leads.", registry=self.registry
        )
        self.pending: Callable[[], Iterable[ServiceKey]] = list
        """Services that this operator would render otherwise."""
        self._status: dict[ServiceKey, Status] = {}
        self._failing: set[ServiceKey] = set()
        self.registry.register(self)

    @contextmanager
    def timed(self, key: ServiceKey) -> Iterator[None]:
        """Measure the time of a pass over a service, and record how it ended."""
        started = time.perf_counter()
        result = "failed"
        try:
            yield
            result = "done"
        finally:
            self._passes.labels(result).inc()
            self._seconds.observe(time.perf_counter() - started)
            (self._failing.add if result == "failed" else self._failing.discard)(key)

    def saw(self, key: ServiceKey, status: Status) -> None:
        """Record the newest status of a service."""
        self._status[key] = status

    def forget(self, key: ServiceKey) -> None:
        self._status.pop(key, None)
        self._failing.discard(key)

    def watch_gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        gauge = Gauge(PREFIX + name, meaning, registry=self.registry)
        gauge.set_function(read)

    def collect(self) -> Iterator[Metric]:
        """Services by condition, and by name those that are not well, and those whose pods wait for
        their turn: few series while all are well."""
        tally = Tally(
            (condition.type, condition.status)
            for status in self._status.values()
            for condition in status.conditions
        )
        family = GaugeMetricFamily(
            f"{PREFIX}services",
            "Services by condition and its status.",
            labels=("condition", "status"),
        )
        for (condition, value), count in sorted(tally.items()):
            family.add_metric((condition, value), count)
        yield family
        unwell = GaugeMetricFamily(
            f"{PREFIX}service_unwell",
            "1 for each service that is to be Available and is not, whose KV transfer was tried in "
            "vain (KVTransferVerified), or whose last pass failed (Reconciled).",
            labels=("namespace", "diptych_dev_service", "condition"),
        )
        for key, condition in sorted(self._unwell()):
            unwell.add_metric((*key, condition), 1)
        yield unwell
        pending = GaugeMetricFamily(
            f"{PREFIX}pending_changes",
            "1 for a service whose pods this operator would render otherwise.",
            labels=("namespace", "diptych_dev_service"),
        )
        for key in self.pending():
            pending.add_metric(key, 1)
        yield pending

    def _unwell(self) -> Iterator[tuple[ServiceKey, str]]:
        yield from ((key, "Reconciled") for key in self._failing)
        for key, status in self._status.items():
            for condition in status.conditions:
                if condition.reason != Reason.SUSPENDED and condition.status in _UNWELL.get(
                    condition.type, ()
                ):
                    yield key, condition.type


Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def serve_probes(
    host: str,
    port: int,
    metrics: OperatorMetrics,
    faults: Callable[[], Sequence[str]],
    unready: Callable[[], Sequence[str]],
) -> AsyncIterator[None]:
    """Serve /metrics, /healthz and /readyz while the context lasts (`WatchLiveness`).

    Replicas that stand by are ready, so that fail-over is quick.
    """

    async def expose(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

    def tell(wrong: Callable[[], Sequence[str]]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            words = wrong()
            status = 503 if words else 200
            return web.Response(text="\n".join(words or ["ok"]) + "\n", status=status)

        return answer

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", expose),
            web.get("/healthz", tell(faults)),
            web.get("/readyz", tell(unready)),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
