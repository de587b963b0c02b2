"""Prometheus metrics: how well a router's predictions come true, and how often
promises were kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from diptych_frontend.observability.metrics import PREFIX
from diptych_router.requests.promises import Kind, Promises
from diptych_router.requests.request_record import BOUNDS, Predictions, Ratios


class PredictionMetrics(Collector):
    """Histograms of predictions. Register it with the router's metrics."""

    def __init__(self, model_name: str, predictions: Predictions) -> None:
        self._model_name = model_name
        self._predictions = predictions

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        first_token = HistogramMetricFamily(
            "diptych:first_token_real_over_predicted",
            "Seconds from the choice of engines to the first token, over what was predicted; by "
            "the pool that computed the prompt.",
            labels=("model_name", "pool"),
        )
        for role, ratios in self._predictions.first_token.items():
            add_buckets(ratios, first_token, (self._model_name, role))
        hand_off = HistogramMetricFamily(
            "diptych:hand_off_real_over_predicted",
            "Seconds from the first token to the one after the hand-off, over what was predicted.",
            labels=("model_name",),
        )
        add_buckets(self._predictions.hand_off, hand_off, (self._model_name,))
        yield from (first_token, hand_off)


def add_buckets(ratios: Ratios, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
    """Add up buckets as Prometheus expects: each includes all values up to its bound."""
    names = [*map(floatToGoString, BOUNDS), "+Inf"]
    family.add_metric(labels, list(zip(names, accumulate(ratios.counts), strict=True)), ratios.sum)


class PromiseCollector(Collector):
    """The counts of one router, at the time of a scrape."""

    def __init__(self, model_name: str, promises: Promises) -> None:
        self._model_name = model_name
        self._promises = promises

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{PREFIX}promises",
            "Requests by what became of a promise of spec.slo: kept, missed, or refused at once.",
            labels=("model_name", *Kind._fields),
        )
        for kind, requests in list(self._promises.counts.items()):
            family.add_metric((self._model_name, *kind), requests)
        yield family
