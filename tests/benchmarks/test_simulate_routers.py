"""Policies side by side, and what another project's router reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.simulate import routers
from benchmarks.simulate.routers import Case


@pytest.fixture(autouse=True)
def short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(routers.TRACES, "agents", ("agents", 150, 0.64, 3.9))
    monkeypatch.setitem(routers.TRACES, "bursts", ("conversations", 200, 0.374, 3.4))
    routers.trace_of.cache_clear()


def test_prefixes_that_are_known_or_fetched_are_not_computed_again() -> None:
    known = routers.simulate(Case("agents", 4, 8, "prefix_aware"))
    unknown = routers.simulate(Case("agents", 4, 8, "round_robin"))
    assert known["hits_of_ideal"] > 1.3 * unknown["hits_of_ideal"]
    assert known["ttft_mean_ms"] < unknown["ttft_mean_ms"]


@pytest.mark.parametrize(
    ("trace", "pods", "speed"),
    [("agents", 16, 8), pytest.param("bursts", 8, 2, marks=pytest.mark.slow)],
)
def test_several_routers_do_nearly_as_well_as_one(trace: str, pods: int, speed: int) -> None:
    one, four = (routers.simulate(Case(trace, pods, speed, "prefix_aware", n)) for n in (1, 4))
    assert four["hits_of_ideal"] > 0.93 * one["hits_of_ideal"]
    assert four["ttft_mean_ms"] < 1.15 * one["ttft_mean_ms"]
    assert four["ttft_p90_ms"] < 1.2 * one["ttft_p90_ms"]


def test_where_a_prompt_is_computed_is_chosen_as_well_as_either_rule_does() -> None:
    def attained(way: str) -> float:
        found: float = routers.simulate(
            Case("agents", 4, 4, "prefix_aware", 1, way, "paper")  # type: ignore[arg-type]
        )["attained"]
        return found

    assert attained("auto") >= 0.95 * max(attained("always"), attained("never"))


def test_a_peers_reports_are_read(tmp_path: Path) -> None:
    report = {
        "mean_ttft_ms": 2.0, "median_ttft_ms": 1.0, "p90_ttft_ms": 3.0, "p99_ttft_ms": 4.0,
        "first_admission_prefix_cache_reused_ratio": 0.32,
    }  # fmt: skip
    (tmp_path / "agents-4-8-kv_router.json").write_text(json.dumps(report))
    [row] = routers.peer_rows(tmp_path)
    assert (row["trace"], row["pods"], row["speed"]) == ("agents", 4, 8)
    assert row["policy"] == "dynamo kv_router"
    assert row["hits_of_ideal"] == pytest.approx(0.5, abs=0.02)
    assert row["ttft_mean_ms"] == 2.0


def test_the_costs_of_the_peers_engines_are_its_polynomial() -> None:
    cost = routers.mocker_costs().prefill
    for tokens in (1, 300, 5000, 8192):
        assert cost._linear(tokens) == pytest.approx(routers.prompt_step_s(tokens), rel=0.02)
