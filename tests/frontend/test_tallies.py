"""Tallies tell what `prometheus_client`'s own counters and histograms tell of the same values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from diptych_frontend.observability.metrics import Tallies

BOUNDS = (0.005, 0.25, 1.0, 10.0)
values = st.lists(st.sampled_from([*BOUNDS, 0.0]) | st.floats(0, 100), max_size=20)


def lines(collector: Collector | CollectorRegistry, accept: str) -> list[str]:
    """An exposition without times of creation, which tallies do not tell."""
    registry = collector
    if not isinstance(collector, CollectorRegistry):
        registry = CollectorRegistry()
        registry.register(collector)
    encode, _ = choose_encoder(accept)
    return [line for line in encode(registry).decode().splitlines() if "_created" not in line]


@given(values, st.sampled_from(["text/plain", "application/openmetrics-text; version=1.0.0"]))
def test_they_look_like_any_others(observed: list[float], accept: str) -> None:
    tallies, usual = Tallies("m"), CollectorRegistry()
    count = tallies.count("a:tokens", "Tokens.")
    times = tallies.times("a:seconds", "Seconds.", BOUNDS)
    counter = Counter("a:tokens", "Tokens.", ("model_name",), registry=usual).labels("m")
    histogram = Histogram(
        "a:seconds", "Seconds.", ("model_name",), registry=usual, buckets=BOUNDS
    ).labels("m")
    for value in observed:
        count.value += value
        counter.inc(value)
        times.observe(value)
        histogram.observe(value)
    assert lines(tallies, accept) == lines(usual, accept)


def test_one_more_is_the_usual_step() -> None:
    count = Tallies("m").count("a", "")
    count.value += 1
    count.value += 2
    assert count.value == 3
