"""What it is worth that routers know of zones: `python -m benchmarks.simulate zones`.

The same arrivals at pods of two zones, between which KV takes ten times as long as within one. A
router is told less or more of that.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

import numpy as np
from benchmarks.machine import machine, record
from benchmarks.simulate.calibration import on_paper
from benchmarks.simulate.report import rows_table
from benchmarks.simulate.traffic import LengthSpread, Traffic, poisson

from diptych.simulator.cluster import Simulation
from diptych.simulator.metrics import Objectives, summarise
from diptych.simulator.plan import SimulatedService, Zones
from diptych_router.choosing.policies import POLICIES

FAR: Final = 10.0
KNOWLEDGE: Final = {
    "no": Zones(2, FAR, told=False, moves_told=False),
    "zones alone": Zones(2, FAR, moves_told=False),
    "moves alone": Zones(2, FAR, told=False),
    "zones and moves": Zones(2, FAR),
}
PODS: Final = (4, 32)
"""In each pool."""
RATES: Final = (2.0, 6.0)
"""Requests a second for each prefill pod; 9 is about what it can do."""
SECONDS: Final = 20.0
SETTLED: Final = 5.0
"""What arrives before that is not counted."""
DOCUMENTS: Final = Traffic(LengthSpread(4000, 0.6, 32000), LengthSpread(300, 0.6, 2000))


def plan(pods: int, zones: Zones, routers: int = 1) -> SimulatedService:
    known = on_paper().plan(pods, pods, routers, POLICIES["prefix_aware"])
    return replace(known, disaggregate="always", zones=zones)


def at(pods: int, rate: float, knows: str, seconds: float = SECONDS) -> dict[str, Any]:
    """One simulated service. Times are in milliseconds, of requests that came once it was under
    way."""
    arrivals = poisson(rate * pods, round(rate * pods * seconds), 0)
    log = Simulation(plan(pods, KNOWLEDGE[knows])).run(DOCUMENTS.requests(arrivals, 0))
    seen = summarise(log, Objectives(1.0, 0.02), SETTLED)
    jobs = [job for job in log.jobs if job.arrival >= SETTLED and job.loaded_s]
    took_ms = np.array([job.loaded_s for job in jobs]) * 1e3
    return {
        "pods": f"{pods}+{pods}",
        "requests/s a pod": rate,
        "router knows": knows,
        "to the other zone": sum(job.far for job in jobs) / len(jobs),
        "hand-off mean ms": float(took_ms.mean()),
        "hand-off p90 ms": float(np.percentile(took_ms, 90)),
        "TTFT p50 ms": seen.ttft_ms["p50"],
        "TTFT p90 ms": seen.ttft_ms["p90"],
        "TPOT p50 ms": seen.tpot_ms["p50"],
    }


def main() -> None:
    began = time.monotonic()
    rows = [at(pods, rate, knows) for pods in PODS for rate in RATES for knows in KNOWLEDGE]
    seconds = time.monotonic() - began
    facts = {"machine": machine(), "costs": on_paper().machine, "seconds": seconds, "rows": rows}
    lines = [
        "# Two zones", "",
        f"`python -m benchmarks.simulate zones`, {seconds:.0f} s on {facts['machine']}. Step "
        f"costs: {facts['costs']}. KV takes {FAR:g} times as long between the zones as within one.",
        "", *rows_table(rows, ["to the other zone"]), "",
    ]  # fmt: skip
    record("zones", facts, "\n".join(lines))
