"""A router's report to the operator (`GET /admin/state`), and to scrapers about its engines'
health."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diptych_frontend.openai.api_keys import ApiKeys
from diptych_protocol import KVTransferStats
from diptych_protocol.admin import EngineReport, PromiseCount, RouterReport
from diptych_router.engines.engine_link import EngineLink
from diptych_router.engines.health_book import Failure
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.pools.pools import Pools
from diptych_router.requests.promises import Kind

PREFIX: Final = "diptych:engine_"


def router_report(client: PoolClient, api_keys: ApiKeys | None = None) -> RouterReport:
    """Return the present state, with the last statistics of engines."""
    reason = client.why_not_ready()
    pools = client.pools
    return RouterReport(
        ready=not reason,
        reason=reason,
        open_requests=len(client.output_processor.answers),
        held_requests=client.num_held,
        serving_revisions=pools.serving.revisions,
        engines=[engine_report(pools, link) for link in pools.links.values() if link.up],
        canaries=list(pools.canaries.values()),
        refused_settings=pools.refused_settings,
        promises=_told(client.table.promises.counts),
        recent_promises=_told(client.table.promises.recent.total(time.monotonic())),
        admits_nobody=api_keys is not None and not api_keys.names,
    )


def _told(counts: Mapping[Kind, int]) -> list[PromiseCount]:
    return [PromiseCount(**kind._asdict(), requests=requests) for kind, requests in counts.items()]


def engine_report(pools: Pools, link: EngineLink) -> EngineReport:
    stats = link.stats
    transfer = stats.kv_transfer or KVTransferStats()
    health = pools.health.of(link.key)
    held = stats.blocks_total - stats.blocks_free
    return EngineReport(
        engine_id=link.name,
        role=link.role,
        revision=link.revision,
        usable=pools.usable(link),
        listed=link.listed,
        draining=stats.draining,
        paused=stats.paused,
        verified=pools.verified(link),
        open_tokens=link.open_tokens,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_prompt_tokens=stats.queued_prompt_tokens,
        kv_usage=held / max(1, stats.blocks_total),
        leases_held=transfer.leases_held,
        blocks_held=transfer.blocks_held,
        loads_failed=transfer.loads_failed,
        leases_expired=transfer.leases_expired,
        stale_reads_refused=transfer.stale_reads_refused,
        prefix_fetches=transfer.prefix_fetches,
        prefix_fetches_failed=transfer.prefix_fetches_failed,
        prefix_tokens_fetched=transfer.prefix_tokens_fetched,
        silent=link.silent,
        breaker=health.breaker.state,
        kept_out=link.kept_out,
        node=link.location.node,
        zone=link.location.zone,
        failures={str(kind): count for kind, count in health.failures.items()},
    )


class HealthCollector(Collector):
    """Metrics at the time of the scrape. Totals begin with the router, or with the engine's
    address."""

    def __init__(self, model_name: str, pools: Pools) -> None:
        self._model_name, self._pools = model_name, pools

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "engine")
        silent = GaugeMetricFamily(
            f"{PREFIX}silent",
            "1: a heartbeat is overdue, or it makes no steps. Processes of a router add up.",
            labels=labels,
        )
        breaker = GaugeMetricFamily(
            f"{PREFIX}breaker_state",
            "1 for the state of its circuit breaker: closed, open or half-open. Processes add up.",
            labels=(*labels, "state"),
        )
        opened = CounterMetricFamily(
            f"{PREFIX}breaker_opened", "How often its circuit breaker opened.", labels=labels
        )
        failures = CounterMetricFamily(
            f"{PREFIX}failures",
            "What it did wrong: error, lost, hang, or late with a first token.",
            labels=(*labels, "kind"),
        )
        for link in self._pools.links.values():
            if not link.up:
                continue
            health = self._pools.health.of(link.key)
            own = (self._model_name, f"{link.role}/{link.name}")
            silent.add_metric(own, float(link.silent))
            breaker.add_metric((*own, health.breaker.state), 1)
            opened.add_metric(own, health.opened)
            for kind in Failure:
                failures.add_metric((*own, kind), health.failures[kind])
        yield from (silent, breaker, opened, failures)
