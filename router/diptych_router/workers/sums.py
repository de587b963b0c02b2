"""The metrics of several processes as those of one router. Pure, but for reading a registry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from diptych_router.workers.messages import Family, Sample

_LEAST: Final = ("process_start_time_seconds", "process_max_fds")
"""The smallest value of these is the router's. Everything else adds up."""
_COUNTING: Final = ("counter", "histogram")

Key = tuple[str, tuple[tuple[str, str], ...]]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Everything in a registry at this moment."""
    return [
        Family(
            family.name,
            family.documentation,
            family.type,
            [Sample(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
        )
        for family in registry.collect()
    ]


def added_up(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """One family of each name, in the order in which they first come."""
    families: dict[str, Family] = {}
    values: dict[str, dict[Key, Sample]] = {}
    for family in (family for part in parts for family in part):
        families.setdefault(family.name, family)
        samples = values.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            known = samples.get(key)
            samples[key] = sample if known is None else _both(known, sample)
    return [
        Family(family.name, family.meaning, family.kind, list(values[name].values()))
        for name, family in families.items()
    ]


def _both(a: Sample, b: Sample) -> Sample:
    if a.name in _LEAST or a.name.endswith("_created"):
        return Sample(a.name, a.labels, min(a.value, b.value))
    return Sample(a.name, a.labels, a.value + b.value)


def what_stays(families: Sequence[Family]) -> list[Family]:
    """What is left of a process that has ended. A total must not fall with it, or whoever computes
    a rate would take the rest of the total for new."""
    return [family for family in families if family.kind in _COUNTING]


class Families(Collector):
    """A registry's collector that yields what it was given."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.meaning, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric
