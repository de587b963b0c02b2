"""What is made of measurements, apart from taking them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.simulate.calibrate import GRID, Round, Work, conclude
from benchmarks.simulate.calibration import Calibration, on_paper
from benchmarks.simulate.check import SCENARIOS, Comparison, page, predict
from benchmarks.simulate.service import PROBE_OUTPUT, PROBE_TOKENS, ServiceTimes

from diptych.simulator.costs import StepCost
from diptych.simulator.engine import EngineLimits

PREFILL = StepCost(((1, 0.01), (64, 0.04), (512, 0.2)), 1e-4, 5e-9, 0.0)
DECODE = StepCost(((1, 0.02), (8, 0.04), (128, 0.1)), 1e-4, 5e-9, 1e-7)


def a_round(drift: float = 1.0) -> Round:
    """Measured on a machine that is `drift` times as slow."""
    costs = {"prefill": PREFILL, "decode": DECODE}
    seconds = {
        role: {work: drift * costs[role].seconds(work.shape) for work in works}
        for role, works in GRID.items()
    }
    prompt = PREFILL.seconds(Work(chunk=PROBE_TOKENS).shape)
    row = DECODE.seconds(Work(1, PROBE_TOKENS + PROBE_OUTPUT // 2).shape)
    times = ServiceTimes(prompt + 0.001 + 0.004, row + 0.001 + 0.003, row + 0.001)
    return Round(seconds, {"prefill": 1.2, "decode": 1.7}, times)


def test_a_calibration_is_the_median_of_its_rounds(tmp_path: Path) -> None:
    rounds = [a_round(), a_round(3.0), a_round()]
    found = conclude(rounds, EngineLimits(1000))
    assert max(abs(e) for errors in found.errors.values() for e in errors) < 1e-6
    assert found.slowdown == {"prefill": 1.2, "decode": 1.7}
    assert found.overheads.step_s == pytest.approx(0.001)
    assert found.overheads.request_s == pytest.approx(0.004)
    assert found.overheads.hand_off_s == pytest.approx(0.003)
    found.write(tmp_path / "costs.json")
    assert Calibration.read(tmp_path / "costs.json") == found


def test_a_file_that_is_no_calibration_is_named(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"machine": "?"}')
    with pytest.raises(ValueError, match=r"costs\.json"):
        Calibration.read(tmp_path / "costs.json")


def test_a_lone_request_takes_what_its_parts_take() -> None:
    found = conclude([a_round()], EngineLimits(1000))
    lone = next(scenario for scenario in SCENARIOS if scenario.users == 1)
    ttft, itl, _ = predict(found, lone.draw(0))
    prompt = PREFILL.seconds(Work(chunk=lone.prompt).shape)
    assert ttft == pytest.approx(1e3 * (prompt + 0.001 + 0.004), rel=0.01)
    assert itl == pytest.approx(
        1e3 * (DECODE.seconds(Work(1, lone.prompt).shape) + 0.001), rel=0.02
    )


def test_the_page_counts_what_is_near_enough() -> None:
    near = Comparison("near", (100.0, 11.0, 10.0), (100.0, 10.0, 10.0))
    far = Comparison("far", (200.0, 10.0, 5.0), (100.0, 10.0, 10.0))
    text = page([near, far], conclude([a_round()], EngineLimits(1000)))
    assert "TTFT p50: 1 of 2, ITL p50: 2 of 2, tokens/s: 1 of 2" in text
    assert "| far | **2.00**" in text


def test_costs_on_paper_are_near_the_roofline() -> None:
    """16 GB at 4.8 TB/s are 3.3 ms, and 8192 tokens of 14 GFLOP at 989 TFLOP/s 120 ms."""
    cost = on_paper().decode
    one = cost.seconds(Work(1, 1).shape)
    assert 0.0033 < one < 0.0055
    assert 0.12 < cost.seconds(Work(chunk=8192).shape) < 0.26
