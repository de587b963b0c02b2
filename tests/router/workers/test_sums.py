"""Several processes' metrics as those of one router."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from diptych_frontend.observability.metrics import ServerMetrics
from diptych_router.workers.messages import Family, Sample
from diptych_router.workers.sums import Families, added_up, families_of, what_stays


def counted(requests: int, seconds: float) -> ServerMetrics:
    metrics = ServerMetrics("m")
    for _ in range(requests):
        metrics.count_answer("/v1/completions", 200)
        metrics.ttft.observe(seconds)
    return metrics


def samples(families: list[Family]) -> dict[str, float]:
    """As a scraper reads them, by name and labels."""
    registry = CollectorRegistry()
    registry.register(Families(families))
    text = generate_latest(registry).decode()
    return {
        " ".join((sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items())))): float(
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts_and_buckets_add_up() -> None:
    found = samples(
        added_up(families_of(one.registry) for one in (counted(3, 0.03), counted(2, 0.3)))
    )
    labels = "model_name=m route=/v1/completions status=200"
    assert found[f"diptych:http_requests_total {labels}"] == 5
    assert found["diptych:time_to_first_token_seconds_count model_name=m"] == 5
    bucket = "diptych:time_to_first_token_seconds_bucket le={} model_name=m"
    assert [found[bucket.format(le)] for le in ("0.02", "0.04", "0.25", "0.5", "+Inf")] == [
        0, 3, 3, 5, 5,
    ]  # fmt: skip
    assert found["diptych:time_to_first_token_seconds_sum model_name=m"] == pytest.approx(0.69)


def test_labels_that_only_one_process_has_seen_are_kept() -> None:
    one, other = ServerMetrics("m"), ServerMetrics("m")
    one.count_answer("/v1/completions", 200, "alice")
    other.count_answer("/v1/completions", 503, "bob")
    found = samples(added_up((families_of(one.registry), families_of(other.registry))))
    assert found["diptych:tenant_requests_total model_name=m status=200 tenant=alice"] == 1
    assert found["diptych:tenant_requests_total model_name=m status=503 tenant=bob"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("process_resident_memory_bytes", 30.0),
        ("process_open_fds", 30.0),
        ("process_start_time_seconds", 10.0),
        ("process_max_fds", 10.0),
        ("diptych:http_requests_created", 10.0),
    ],
)
def test_what_is_no_count(name: str, expected: float) -> None:
    parts = [[Family("f", "", "gauge", [Sample(name, {}, value)])] for value in (20.0, 10.0)]
    assert added_up(parts)[0].samples == [Sample(name, {}, expected)]


def test_totals_of_an_ended_process_stay_and_its_memory_does_not() -> None:
    ended = families_of(counted(3, 0.03).registry)
    found = samples(added_up((what_stays(ended), families_of(counted(2, 0.3).registry))))
    assert found["diptych:http_requests_total model_name=m route=/v1/completions status=200"] == 5
    assert not any(family.name.startswith("process_resident") for family in what_stays(ended))
    assert any(family.name == "process_cpu_seconds" for family in what_stays(ended))


def test_nothing_is_the_sum_of_nothing() -> None:
    assert added_up(()) == []
