"""Copies the values of a Prometheus registry into plain objects, under vLLM's class names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]
    """Upper bound (as text, the last is `+Inf`) -> the number of values up to it."""


def take_snapshot(registry: CollectorRegistry) -> list[Metric]:
    """Return one object for each metric and set of labels, in the registry's order."""
    return [metric for family in registry.collect() for metric in _read(family)]


def _read(family: Family) -> Iterator[Metric]:
    match family.type:
        case "counter":
            for sample in family.samples:
                if sample.name == f"{family.name}_total":
                    yield Counter(family.name, dict(sample.labels), sample.value)
        case "gauge":
            for sample in family.samples:
                yield Gauge(family.name, dict(sample.labels), sample.value)
        case "histogram":
            yield from _read_histograms(family)


def _read_histograms(family: Family) -> Iterator[Histogram]:
    """The samples of one set of labels: its buckets in order, their count, their sum."""
    buckets: dict[str, int] = {}
    count = 0
    for sample in family.samples:
        if sample.name == f"{family.name}_bucket":
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name == f"{family.name}_count":
            count = int(sample.value)
        elif sample.name == f"{family.name}_sum":
            yield Histogram(family.name, dict(sample.labels), count, sample.value, buckets)
            buckets = {}
