"""How often promises were kept, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych_frontend.observability.metrics import PREFIX
from diptych_router.slo.promises import Kind, Promises


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
