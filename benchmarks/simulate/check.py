"""Predicted over measured: one prefill and one decode engine of this machine, under several loads.

The machine's speed drifts, so calibrations and measurements alternate: what was measured is
compared with what follows from the calibrations before and after its repetition, and the medians
of these quotients count.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.machine import machine, record
from benchmarks.servers import diptych_pair, running
from benchmarks.simulate.calibrate import Round, benches, conclude
from benchmarks.simulate.calibration import Calibration
from benchmarks.simulate.service import send
from benchmarks.simulate.traffic import LengthSpread, Traffic, poisson

from diptych.bench.stream import Sample
from diptych.simulator.cluster import Simulation
from diptych.simulator.metrics import Objectives, summarise
from diptych.simulator.workload import Request

FIGURES = ("TTFT p50", "ITL p50", "tokens/s")
AIM = 0.15
OUTPUT = LengthSpread(32)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load: so many users who wait for answers, or so many requests a second."""

    name: str
    prompt: int
    requests: int
    users: int = 0
    rate: float = 0.0

    def draw(self, seed: int) -> list[Request]:
        traffic = Traffic(LengthSpread(self.prompt), OUTPUT)
        if self.users:
            return traffic.requests(np.zeros(self.requests), seed, self.users)
        return traffic.requests(poisson(self.rate, self.requests, seed), seed)


SCENARIOS = (
    *(
        Scenario(f"{users} users, {prompt} tokens", prompt, max(3, users + min(users, 4)), users)
        for prompt in (128, 512)
        for users in (1, 4, 16)
    ),
    Scenario("Poisson 0.3/s, 128 tokens", 128, 10, rate=0.3),
    Scenario("Poisson 0.6/s, 128 tokens", 128, 15, rate=0.6),
    Scenario("Poisson 0.2/s, 512 tokens", 512, 8, rate=0.2),
)

Figures = tuple[float, float, float]


def predict(measured: Calibration, requests: Sequence[Request]) -> Figures:
    """TTFT and ITL in milliseconds, tokens a second."""
    log = Simulation(measured.plan(1, 1)).run(requests)
    got = summarise(log, Objectives(1.0, 1.0))
    return got.ttft_ms["p50"], got.itl_ms["p50"], got.output_tokens_per_s


def observe(samples: Sequence[Sample], wall_s: float) -> Figures:
    """The same of a real service."""
    return (
        statistics.median(sample.ttft_s for sample in samples) * 1e3,
        statistics.median(gap for sample in samples for gap in sample.gaps_s) * 1e3,
        sum(sample.output_tokens for sample in samples) / wall_s,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario in one repetition."""

    scenario: str
    predicted: Figures
    measured: Figures


def run(
    repetitions: int, scenarios: Sequence[Scenario]
) -> Iterator[tuple[list[Comparison], Calibration]]:
    """Every scenario so often, with a calibration before each repetition and after the last one.
    Yields what is known after each scenario, compared with the calibration before it, and again at
    the end, compared with those on both sides; and what all calibrations come to."""
    rounds: list[Round] = []
    seen: list[tuple[int, Scenario, list[Request], Figures]] = []

    def known() -> tuple[list[Comparison], Calibration]:
        around = [conclude(rounds[at : at + 2], limits) for at in range(len(rounds))]
        return [
            Comparison(scenario.name, predict(around[at], requests), figures)
            for at, scenario, requests, figures in seen
        ], conclude(rounds, limits)

    with running(diptych_pair()) as service, benches() as engines:
        limits = engines["decode"].limits()
        for repetition in range(repetitions):
            rounds.append(Round.measure(engines, service.url, repetition))
            for number, scenario in enumerate(scenarios):
                seed = 1000 * (repetition + 1) + number
                requests = scenario.draw(seed)
                figures = observe(*asyncio.run(send(service.url, requests, seed)))
                seen.append((repetition, scenario, requests, figures))
                yield known()
        rounds.append(Round.measure(engines, service.url, repetitions))
        yield known()


def page(comparisons: Sequence[Comparison], measured: Calibration) -> str:
    """All of it in Markdown."""
    lines = [
        "# The simulator against a real 1P1D service", "",
        f"`python -m benchmarks.simulate check` on {measured.machine}; load at the end "
        f"{os.getloadavg()[1]:.1f}, about 2 of it what is measured. Predicted over measured, "
        "medians over repetitions (lowest to highest); in brackets the measured median. TTFT and "
        "ITL in ms.", "",
        f"| load | {' | '.join(FIGURES)} |", "|---|---:|---:|---:|",
    ]  # fmt: skip
    medians: list[list[float]] = [[], [], []]
    for name in dict.fromkeys(each.scenario for each in comparisons):
        cells = []
        for place, kept in enumerate(medians):
            mine = [each for each in comparisons if each.scenario == name]
            ratios = [each.predicted[place] / each.measured[place] for each in mine]
            kept.append(statistics.median(ratios))
            real = statistics.median(each.measured[place] for each in mine)
            cells.append(f"**{kept[-1]:.2f}** ({min(ratios):.2f}-{max(ratios):.2f}) [{real:.0f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    over = [statistics.median(kept) for kept in medians]
    lines.append(f"| **median over loads** | {' | '.join(f'**{ratio:.2f}**' for ratio in over)} |")
    within = [sum(abs(ratio - 1) <= AIM for ratio in kept) for kept in medians]
    counts = ", ".join(
        f"{figure}: {count} of {len(kept)}"
        for figure, count, kept in zip(FIGURES, within, medians, strict=True)
    )
    lines += ["", f"Loads within {AIM:.0%}: {counts}."]
    return "\n".join(lines) + "\n"


def main(repetitions: int, costs: Path) -> None:
    for comparisons, measured in run(repetitions, SCENARIOS):
        write(comparisons, measured, costs)


def write(comparisons: Sequence[Comparison], measured: Calibration, costs: Path) -> None:
    """Page, record and calibration."""
    measured.write(costs)
    rows = [
        {"scenario": c.scenario, "predicted": c.predicted, "measured": c.measured}
        for c in comparisons
    ]
    facts = {"machine": machine(), "figures": FIGURES, "comparisons": rows}
    record("simulate-check", facts, page(comparisons, measured))
