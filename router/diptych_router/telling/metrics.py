"""Prometheus metrics of a router: how well its predictions come true, how often promises were kept,
and the health of engines."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from diptych_frontend.observability.metrics import PREFIX
from diptych_router.engines.health_book import Failure
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.pools.pools import Pools
from diptych_router.requests.promises import Kind, Promises
from diptych_router.requests.request_record import Predictions


class RouterMetrics(Collector):
    """The metrics of one router at the time of a scrape. Register it with those of its API."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        model_name, table = self._client.model_name, self._client.table
        yield from of_predictions(model_name, table.predictions)
        yield from _of_health(model_name, self._client.pools)
        yield _of_promises(model_name, table.promises)


def of_predictions(model_name: str, predictions: Predictions) -> Iterator[Metric]:
    first_token = HistogramMetricFamily(
        "diptych:first_token_real_over_predicted",
        "Seconds from the choice of engines to the first token, over what was predicted; by "
        "the pool that computed the prompt.",
        labels=("model_name", "pool"),
    )
    for role, ratios in predictions.first_token.items():
        first_token.add_metric((model_name, role), ratios.buckets(), ratios.sum)
    hand_off = HistogramMetricFamily(
        "diptych:hand_off_real_over_predicted",
        "Seconds from the first token to the one after the hand-off, over what was predicted.",
        labels=("model_name",),
    )
    ratios = predictions.hand_off
    hand_off.add_metric((model_name,), ratios.buckets(), ratios.sum)
    yield from (first_token, hand_off)


def _of_promises(model_name: str, promises: Promises) -> Metric:
    family = CounterMetricFamily(
        f"{PREFIX}promises",
        "Requests by what became of a promise of spec.slo: kept, missed, or refused at once.",
        labels=("model_name", *Kind._fields),
    )
    for kind, requests in list(promises.counts.items()):
        family.add_metric((model_name, *kind), requests)
    return family


def _of_health(model_name: str, pools: Pools) -> Iterator[Metric]:
    """Totals begin with the router, or with the engine's address."""
    labels = ("model_name", "engine")
    silent = GaugeMetricFamily(
        f"{PREFIX}engine_silent",
        "1: a heartbeat is overdue, or it makes no steps. Processes of a router add up.",
        labels=labels,
    )
    breaker = GaugeMetricFamily(
        f"{PREFIX}engine_breaker_state",
        "1 for the state of its circuit breaker: closed, open or half-open. Processes add up.",
        labels=(*labels, "state"),
    )
    opened = CounterMetricFamily(
        f"{PREFIX}engine_breaker_opened", "How often its circuit breaker opened.", labels=labels
    )
    failures = CounterMetricFamily(
        f"{PREFIX}engine_failures",
        "What it did wrong: error, lost, hang, or late with a first token.",
        labels=(*labels, "kind"),
    )
    for link in pools.links.values():
        if not link.up:
            continue
        found = link.breaker
        own = (model_name, f"{link.role}/{link.name}")
        silent.add_metric(own, float(link.silent))
        breaker.add_metric((*own, found.state), 1)
        opened.add_metric(own, found.num_opened)
        for kind in Failure:
            failures.add_metric((*own, kind), found.failures[kind])
    turns = CounterMetricFamily(
        f"{PREFIX}role_turns",
        "How often engines changed their roles, by the new one.",
        labels=("model_name", "role"),
    )
    for role, count in pools.turns.items():
        turns.add_metric((model_name, role), count)
    yield from (silent, breaker, opened, failures, turns)
