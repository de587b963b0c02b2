"""The short version of `make simulate`: random schedules of requests and faults, fixed seeds."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from explore import Report, run_many
from sim_schedule import run_schedule
from waits import PATIENCE_S

EXPLORER = Path(__file__).with_name("explore.py")


MANY = pytest.param(2000, marks=(pytest.mark.slow, pytest.mark.timeout(900)))
"""They take minutes beside other tests."""


@pytest.fixture(scope="module", params=[150, MANY])
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """What the first schedules found."""
    logging.disable(logging.CRITICAL)
    try:
        yield run_many(range(request.param))
    finally:
        logging.disable(logging.NOTSET)


def _failures(report: Report, mark: str) -> list[tuple[int, str]]:
    return [(seed, what) for seed, what in report.failures if f": {mark}:" in what]


def test_P1_no_block_is_leaked_whatever_fails(report: Report) -> None:
    assert _failures(report, "P1") == []


def test_P2_no_token_and_no_cached_prefix_is_ever_made_of_foreign_kv(report: Report) -> None:
    assert _failures(report, "P2") == []


def test_P3_every_request_comes_to_an_end(report: Report) -> None:
    assert _failures(report, "P3") == []


def test_P6_tokens_and_ends_are_told_exactly_once(report: Report) -> None:
    assert _failures(report, "P6") == []


def test_nothing_raises_anything_else(report: Report) -> None:
    known = [pair for mark in ("P1", "P2", "P3", "P6") for pair in _failures(report, mark)]
    assert [failure for failure in report.failures if failure not in known] == []


def test_schedules_reach_what_they_are_for(report: Report) -> None:
    """A simulator in which nothing goes wrong proves nothing."""
    wanted = {"load ok", "load failed", "lease released", "lease revoked", "lease expired",
              "lease refused: it was revoked", "prefix evicted on decode",
              "step launched ahead", "router lost an engine",
              "answer goes on at another router: a part"}  # fmt: skip
    assert {kind for kind in wanted if not report.seen[kind]} == set()
    assert len(report.states) > 1000


def test_a_seed_replays_the_same_schedule_in_another_process() -> None:
    """Whose hashes of texts are others'."""
    trace: list[str] = []
    run_schedule(5, trace.append)
    assert len(trace) > 20
    replayed = subprocess.run(
        [sys.executable, str(EXPLORER), "--seed", "5"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout.splitlines()
    told = [line for line in replayed if not line.startswith("          log: ")]
    assert told == [*"\n".join(trace).splitlines(), "nothing is wrong"]
