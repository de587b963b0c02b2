"""Fast counters and histograms without labels, for what is counted for every token.

Those of `prometheus_client` take a lock and several calls for each value, which is a tenth of what
a token costs a server. These are written by one thread, and collected like any others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Count:
    """A total."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, which is not negative."""
        self.value += amount


class Times:
    """A histogram: counts values by bucket."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the largest value of each bucket, ascending. One more bucket is for larger
        values."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

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

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for name, meaning, count in self._counts:
            counter = CounterMetricFamily(name, meaning, labels=("model_name",))
            counter.add_metric(self._labels, count.value)
            yield counter
        for name, meaning, times in self._times:
            histogram = HistogramMetricFamily(name, meaning, labels=("model_name",))
            histogram.add_metric(self._labels, times.buckets(), times.sum)
            yield histogram
