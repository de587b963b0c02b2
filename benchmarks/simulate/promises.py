"""What refusing late requests at once does to goodput: `python -m benchmarks.simulate promises`.

The same arrivals with and without, below and above what the service can do.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from benchmarks.machine import RESULTS, machine, record
from benchmarks.simulate.calibration import on_paper
from benchmarks.simulate.report import plot_lines, rows_table
from benchmarks.simulate.traffic import LengthSpread, Traffic, poisson

from diptych.simulator.cluster import Simulation
from diptych.simulator.metrics import Objectives, RunSummary, summarise
from diptych_router.choosing.policies import POLICIES

LOADS = (0.5, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
"""Parts of `CAPACITY`."""
CAPACITY = 36.0
"""Requests a second of the whole service: about the largest rate at which 95 % of all requests keep
both promises when none is refused."""
PODS = 4
"""In each pool."""
SECONDS = 40.0
WINDOW = (5.0, SECONDS)
DOCUMENTS = Traffic(LengthSpread(4000, 0.6), LengthSpread(300, 0.6))
OBJECTIVES = Objectives(1.0, 0.02)
CASES = {
    f"documents, {routers} router{'s' * (routers > 1)}": routers for routers in (1, 2, 4)
}  # fmt: skip


def simulate(routers: int, load: float, *, refuse: bool) -> RunSummary:
    rate = CAPACITY * load
    plan = replace(
        on_paper().plan(PODS, PODS, routers, POLICIES["prefix_aware"]),
        disaggregate="always",
        promised_s=OBJECTIVES.ttft_s if refuse else None,
    )
    requests = DOCUMENTS.requests(poisson(rate, round(rate * SECONDS), 0), 0)
    return summarise(Simulation(plan).run(requests), OBJECTIVES, *WINDOW)


def run() -> dict[str, Any]:
    began = time.monotonic()
    rows = []
    for case, routers in CASES.items():
        for load in LOADS:
            without, refusing = (simulate(routers, load, refuse=refuse) for refuse in (False, True))
            rows.append(
                {
                    "case": case,
                    "load": load,
                    "good/s without": without.goodput_per_s,
                    "good/s": refusing.goodput_per_s,
                    "refused": refusing.refused / (refusing.requests + refusing.refused),
                    "TTFT p99 ms without": without.ttft_ms["p99"],
                    "TTFT p99 ms": refusing.ttft_ms["p99"],
                }
            )
    facts = {"machine": machine(), "costs": on_paper().machine, "rows": rows}
    return {**facts, "seconds": time.monotonic() - began}


def main() -> None:
    """Record, page and picture."""
    results = run()
    rows = results["rows"]
    lines = [
        "# Late requests refused at once", "",
        f"`python -m benchmarks.simulate promises`, {results['seconds']:.0f} s on "
        f"{results['machine']}. Step costs: {results['costs']}. {PODS} prefill and {PODS} decode "
        f"pods. Load 1 is {CAPACITY:g} requests/s, about the largest rate at which 95 % "
        "of all requests keep both promises when none is refused.", "",
        *rows_table(rows, ["refused"]), "",
    ]  # fmt: skip
    record("promises", results, "\n".join(lines))
    first = next(iter(CASES))
    drawn = {"none refused": {r["load"]: r["good/s without"] for r in rows if r["case"] == first}}
    drawn |= {
        f"late ones refused: {case}": {
            row["load"]: row["good/s"] for row in rows if row["case"] == case
        }
        for case in CASES
    }
    plot_lines(
        drawn, RESULTS / "promises.svg", "An 8B model on H200s, costs from its roofline",
        ("load over capacity", "good requests/s"),
    )  # fmt: skip
