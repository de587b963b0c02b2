"""A thousand pods on paper: an 8B model on one H200 a pod, with costs from its roofline.

`python -m benchmarks.simulate study` writes benchmarks/results/capacity.{md,json} and pictures.
What it means stands in docs/capacity.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from benchmarks.machine import RESULTS, machine, record
from benchmarks.simulate.calibration import on_paper
from benchmarks.simulate.capacity import Workload, goodput, simulate
from benchmarks.simulate.report import plot_lines, rows_table
from benchmarks.simulate.traffic import LengthSpread, Sharing, Traffic, poisson

from diptych.simulator.cluster import Simulation
from diptych.simulator.metrics import Objectives, summarise
from diptych.simulator.plan import SimulatedService
from diptych_router.choosing.policies import POLICIES

SMALL = 20
"""Pods of the sweeps; `scale` shows that a thousand do in proportion."""
PARTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Fractions of the pods that prefill."""
BUDGETS = (512, 2048, 8192)
"""Token budgets of a step of aggregated pods."""
RACK = 16
"""Number of pods in a rack of a fleet of four hundred pods; as large a part of it as forty of a
thousand."""
LONGEST = 32000
CHAT = Workload(
    "chat",
    Traffic(LengthSpread(500, 0.8, LONGEST), LengthSpread(300, 0.6, 2000)),
    Objectives(0.5, 0.02),
)
WORKLOADS = (
    CHAT,
    Workload(
        "documents", Traffic(LengthSpread(4000, 0.6, LONGEST), LengthSpread(300, 0.6, 2000)),
        Objectives(1.0, 0.02),
    ),
    Workload(
        "summaries", Traffic(LengthSpread(8000, 0.5, LONGEST), LengthSpread(150, 0.5, 1000)),
        Objectives(2.0, 0.02),
    ),
    Workload(
        "reasoning", Traffic(LengthSpread(500, 0.8, LONGEST), LengthSpread(1500, 0.5, 6000)),
        Objectives(0.5, 0.02), seconds=50.0,
    ),
)  # fmt: skip
DOCUMENTS = WORKLOADS[1]
AGENTS = Workload(
    "agents",
    Traffic(
        LengthSpread(1500, 0.6, LONGEST),
        LengthSpread(200, 0.6, 2000),
        Sharing(1.0, 2000, 6000, 0.8),
    ),
    Objectives(1.0, 0.02),
)
"""Before each prompt there are six thousand tokens of instructions and tools: one of two thousand
different beginnings."""

SHARES = ("part", "attained", "cache", "again", "unnoticed", "afterwards", "load")
Row = dict[str, Any]


def pods(prefill: int, decode: int, budget: int = 8192, **changes: Any) -> SimulatedService:
    return replace(on_paper(budget).plan(prefill, decode), **changes)


def split(total: int, part: float) -> tuple[int, int]:
    """Prefill and decode pods, at least one of each."""
    prefill = min(max(1, round(total * part)), total - 1)
    return prefill, total - prefill


def at_ratio(workload: Workload, part: float) -> Row:
    rate = goodput(pods(*split(SMALL, part)), workload)
    return {"workload": workload.name, "prefill part": part, "good/s a pod": rate / SMALL}


def aggregated(workload: Workload, budget: int) -> Row:
    rate = goodput(pods(0, SMALL, budget), workload)
    return {"workload": workload.name, "tokens a step": budget, "good/s a pod": rate / SMALL}


def gaps(name: str, plan: SimulatedService, rate: float) -> Row:
    """What streams see of others' prompts, under the same load."""
    got, _ = simulate(plan, DOCUMENTS, rate)
    return {
        "pods": name, "attained": got.attained, "TTFT p99 ms": got.ttft_ms["p99"],
        "ITL p50 ms": got.itl_ms["p50"], "ITL p99 ms": got.itl_ms["p99"],
        "TPOT p99 ms": got.tpot_ms["p99"],
    }  # fmt: skip


def gap_rows(part: float, rate: float) -> list[Callable[[], Row]]:
    """Two pools, and aggregated pods with small and large steps."""
    return [
        partial(gaps, "two pools", pods(*split(SMALL, part)), rate),
        *(partial(gaps, f"aggregated, {b}", pods(0, SMALL, b), rate) for b in BUDGETS),
    ]


def at_scale(part: float, rate_a_pod: float, total: int) -> Row:
    """The same load a pod, on more pods."""
    began = time.process_time()
    workload = replace(DOCUMENTS, seconds=12.0)
    plan = pods(*split(total, part))
    got, log = simulate(plan, workload, rate_a_pod * total)
    seconds = time.process_time() - began
    return {
        "pods": total, "requests": len(log.jobs), "attained": got.attained,
        "TTFT p50 ms": got.ttft_ms["p50"], "TTFT p99 ms": got.ttft_ms["p99"],
        "TPOT p99 ms": got.tpot_ms["p99"], "CPU s": seconds,
    }  # fmt: skip


def with_routers(part: float, rate: float, total: int, routers: int) -> Row:
    workload = replace(DOCUMENTS, seconds=8.0)
    plan = pods(*split(total, part), routers=routers)
    got, log = simulate(plan, workload, rate)
    busy = [s for key, s in log.busy_s.items() if key.startswith("prefill")]
    return {
        "routers": routers, "attained": got.attained, "TTFT p50 ms": got.ttft_ms["p50"],
        "TTFT p99 ms": got.ttft_ms["p99"], "TPOT p99 ms": got.tpot_ms["p99"],
        "busiest prefill pod over mean": max(busy) / float(np.mean(busy)),
    }  # fmt: skip


def with_policy(total: int, rate_a_pod: float, policy: str) -> Row:
    plan = pods(*split(total, 0.5), policy=POLICIES[policy])
    got, log = simulate(plan, replace(AGENTS, seconds=15.0), rate_a_pod * total)
    prompts = sum(job.request.prompt for job in log.jobs)
    return {
        "policy": policy, "pods": total, "req/s a pod": rate_a_pod, "attained": got.attained,
        "TTFT p50 ms": got.ttft_ms["p50"], "TTFT p99 ms": got.ttft_ms["p99"],
        "prompt tokens from cache": log.cached_tokens / prompts,
    }  # fmt: skip


def rack_fails(part: float, rate: float, total: int, kind: str, load: float) -> Row:
    """What happens when a rack fails after eight seconds."""
    prefill, decode = split(total, part)
    racks = {
        "prefill": [f"prefill-{n}" for n in range(RACK)],
        "decode": [f"decode-{n}" for n in range(RACK)],
        "mixed": [f"prefill-{n}" for n in range(round(RACK * part))]
        + [f"decode-{n}" for n in range(RACK - round(RACK * part))],
    }
    arrivals = poisson(rate * load, round(rate * load * 22), 0)
    requests = DOCUMENTS.traffic.requests(arrivals, 0)
    log = Simulation(pods(prefill, decode)).run(requests, [(8.0, racks[kind])])
    before, during, after = (
        summarise(log, DOCUMENTS.objectives, *window).attained
        for window in ((4.0, 7.0), (8.0, 14.0), (17.0, 21.0))
    )
    again = [job for job in log.jobs if job.attempts > 1]
    return {
        "rack": kind, "load": load, "requests begun again": len(again) / len(log.jobs),
        "attained before": before, "while unnoticed": during, "afterwards": after,
        "lost requests": len(requests) - len(log.jobs),
    }  # fmt: skip


def run() -> dict[str, Any]:
    """Everything, on all cores."""
    began = time.monotonic()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def rows(calls: Iterable[Callable[[], Row]]) -> list[Row]:
            return [future.result() for future in [pool.submit(call) for call in calls]]

        ratios = rows(partial(at_ratio, w, part) for w in WORKLOADS for part in PARTS)
        alone = rows(partial(aggregated, w, budget) for w in WORKLOADS for budget in BUDGETS)
        best = max(
            (row for row in ratios if row["workload"] == DOCUMENTS.name),
            key=lambda row: row["good/s a pod"],
        )
        part, each = best["prefill part"], best["good/s a pod"]
        load = 0.85 * each
        results = {
            "machine": machine(),
            "costs": on_paper().machine,
            "ratios": ratios,
            "aggregated": alone,
            "gaps": rows(gap_rows(part, 4.0 * SMALL)),
            "scale": rows(partial(at_scale, part, load, n) for n in (10, 40, 200, 1000)),
            "routers": rows(
                partial(with_routers, part, load * 1000, 1000, n) for n in (1, 4, 16, 64)
            ),
            "prefixes": rows(
                partial(with_policy, 200, rate, policy)
                for rate in (2.0, 4.0, 6.0, 8.0)
                for policy in POLICIES
            ),
            "rack": rows(
                partial(rack_fails, part, each * 400, 400, kind, at)
                for at in (0.7, 0.9)
                for kind in ("prefill", "decode", "mixed")
            ),
        }
    return {**results, "seconds": time.monotonic() - began}


def main() -> None:
    """Record, page and pictures."""
    results = run()
    lines = [
        "# A thousand pods on paper", "",
        f"`python -m benchmarks.simulate study`, {results['seconds']:.0f} s on "
        f"{results['machine']}. Step costs: {results['costs']}.",
    ]  # fmt: skip
    for part in ("ratios", "aggregated", "gaps", "scale", "routers", "prefixes", "rack"):
        lines += ["", f"## {part.capitalize()}", "", *rows_table(results[part], SHARES)]
    record("capacity", results, "\n".join([*lines, ""]))
    plot_lines(
        {
            w.name: {
                row["prefill part"]: row["good/s a pod"]
                for row in results["ratios"]
                if row["workload"] == w.name
            }
            for w in WORKLOADS
        },
        RESULTS / "capacity-ratio.svg",
        "An 8B model on H200s, costs from its roofline",
        ("part of the pods that prefill", "good requests/s a pod"),
    )
    plot_lines(
        {
            f"{policy}": {
                row["req/s a pod"]: row["TTFT p99 ms"]
                for row in results["prefixes"]
                if row["policy"] == policy
            }
            for policy in POLICIES
        },
        RESULTS / "capacity-prefixes.svg",
        "Common prefixes: what the router does, and what affinity would do",
        ("requests/s a pod", "TTFT p99 ms"),
    )
