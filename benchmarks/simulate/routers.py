"""Policies of the router side by side on the same traces, and beside the router of NVIDIA Dynamo.

`python -m benchmarks.simulate routers` writes benchmarks/results/routing.{md,json,png}. What it
means stands in benchmarks/results/findings.md. The engines cost what those of Dynamo's simulator
cost (`mocker_costs`), so its own reports can be set beside ours: `--peer DIRECTORY` reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from benchmarks.machine import RESULTS, machine, record
from benchmarks.report import looks
from benchmarks.simulate.calibration import Calibration, on_paper
from benchmarks.traces.generate import generate
from benchmarks.traces.recorded import BLOCK_TOKENS, Trace, of_trace

from diptych.plots import new_figure, save
from diptych.simulator.cluster import Simulation
from diptych.simulator.costs import StepCost
from diptych.simulator.engine import EngineLimits
from diptych.simulator.metrics import Objectives
from diptych.simulator.plan import Overheads
from diptych_protocol.router_settings import Disaggregate
from diptych_router.choosing.policies import POLICIES

LIMITS: Final = EngineLimits(16384, 64, max_num_seqs=256, max_num_batched_tokens=8192)
KNOTS: Final = (1, 256, 1024, 2048, 4096, 6144, 8192)
KV_TOKEN_S: Final = 131072 / 64e9
"""KV of an 8B model over 64 GB/s."""


def prompt_step_s(tokens: int) -> float:
    """Seconds of a step that computes so many tokens of prompts."""
    return (4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142) * 1e-3


def mocker_costs() -> Calibration:
    """Return the step costs of the engines that NVIDIA Dynamo's router is simulated with: its
    `mocker` has a polynomial for steps that compute prompts, and one for steps that decode
    (ai-dynamo/dynamo, `lib/mocker/src/common/perf_model.rs`).

    Its decode steps take 5.74 ms, and 54.01 ms more for each part of its KV memory in use. The
    square of that part is left out: it is small here."""
    capacity = LIMITS.num_blocks * LIMITS.block_size
    return Calibration(
        machine="the engine of Dynamo's simulator (mocker's polynomials)",
        prefill=StepCost(tuple((knot, prompt_step_s(knot)) for knot in KNOTS), 0.0, 0.0, 0.0),
        decode=StepCost(((1, 5.74e-3),), 0.0, 0.0, 54.01e-3 / capacity),
        slowdown={"prefill": 1.0, "decode": 1.0},
        overheads=Overheads(request_s=0.0, hand_off_s=1e-3, kv_token_s=KV_TOKEN_S),
        limits=LIMITS,
        one_machine=False,
        errors={},
    )


TRACES: Final = {
    "agents": ("agents", 1500, 0.64, 3.9),
    "conversations": ("conversations", 2500, 0.366, 3.4),
    "bursts": ("conversations", 3000, 0.374, 3.4),
}
"""Name -> kind, requests, ideal hit rate, requests a second; the seed is 0."""
BURST_S: Final = 3.0
"""The requests of `bursts` come every 3 s, ten at once, and are twice as long."""
SPEEDS: Final = {"agents": (1, 2, 3, 4, 5, 6), "conversations": (2, 4, 6, 8, 12)}
"""Multiples of the rate for 4+4 engines."""
BURST_SPEEDS: Final = (1, 2, 4)
"""And for 8+8."""
LARGE_SPEEDS: Final = {"agents": (16, 48), "conversations": (32, 96)}
"""And for 64+64."""
OBJECTIVES: Final = Objectives(1.0, 0.05)


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    trace: str
    pods: int
    """Engines of each pool."""
    speed: int
    policy: str
    routers: int = 1
    disaggregate: Disaggregate = "always"
    engines: str = "mocker"
    """`mocker`, or `paper`: engines whose decode steps also compute prompts."""


def cases() -> Iterator[Case]:
    """All runs."""
    for trace, speeds in SPEEDS.items():
        for speed in speeds:
            for policy in ("round_robin", "least_loaded", "prefix_aware"):
                yield Case(trace, 4, speed, policy)
            yield Case(trace, 4, speed, "prefix_aware", routers=4)
        for speed in LARGE_SPEEDS[trace]:
            yield Case(trace, 64, speed, "least_loaded")
            yield Case(trace, 64, speed, "prefix_aware")
            yield Case(trace, 64, speed, "prefix_aware", routers=4)
    for speed in BURST_SPEEDS:
        for policy, routers in (("least_loaded", 1), ("prefix_aware", 1), ("prefix_aware", 4)):
            yield Case("bursts", 8, speed, policy, routers)
    for policy, routers in (("least_loaded", 1), ("prefix_aware", 1), ("prefix_aware", 4)):
        yield Case("agents", 500, 128, policy, routers)
    for speed in (2, 4, 8):
        for way in ("always", "auto", "never"):
            yield Case("agents", 4, speed, "prefix_aware", 1, way, "paper")


@cache
def trace_of(name: str) -> Trace:
    kind, requests, hit_rate, rate = TRACES[name]
    trace = generate(kind, requests, hit_rate, rate, 0)
    return trace.scaled(2 * BLOCK_TOKENS).in_bursts(BURST_S) if name == "bursts" else trace


def simulate(case: Case) -> dict[str, Any]:
    """What users saw of one run."""
    trace = trace_of(case.trace)
    costs = mocker_costs() if case.engines == "mocker" else on_paper()
    plan = replace(
        costs.plan(case.pods, case.pods, case.routers, POLICIES[case.policy]),
        disaggregate=case.disaggregate,
    )
    log = Simulation(plan).run(of_trace(trace.faster(case.speed)))
    ttft = np.array([job.first_at - job.arrival for job in log.jobs])
    tpot = np.array(
        [(job.ended_at - job.first_at) / max(1, job.request.output - 1) for job in log.jobs]
    )
    good = (ttft <= OBJECTIVES.ttft_s) & (tpot <= OBJECTIVES.tpot_s)
    hits = log.cached_tokens / sum(job.request.prompt for job in log.jobs)
    return asdict(case) | _milliseconds(ttft) | {
        "hits_of_ideal": hits / trace.ideal_hit_rate(),
        "attained": float(good.mean()),
        "tpot_p99_ms": float(np.percentile(tpot, 99) * 1e3),
    }  # fmt: skip


def _milliseconds(ttft: np.ndarray[Any, Any]) -> dict[str, float]:
    percentiles = {f"ttft_p{p}_ms": float(np.percentile(ttft, p) * 1e3) for p in (50, 90, 99)}
    return {"ttft_mean_ms": float(ttft.mean() * 1e3)} | percentiles


def peer_rows(directory: Path) -> list[dict[str, Any]]:
    """Reports of `dynamo.replay`, named TRACE-PODS-SPEED-MODE.json."""
    rows = []
    for path in sorted(directory.glob("*-*-*-*.json")):
        trace, pods, speed, mode = path.stem.split("-")
        raw = json.loads(path.read_text())
        hits = raw["first_admission_prefix_cache_reused_ratio"]
        rows.append({
            "trace": trace, "pods": int(pods), "speed": int(speed), "policy": f"dynamo {mode}",
            "ttft_mean_ms": raw["mean_ttft_ms"], "ttft_p50_ms": raw["median_ttft_ms"],
            "ttft_p90_ms": raw["p90_ttft_ms"], "ttft_p99_ms": raw["p99_ttft_ms"],
            "hits_of_ideal": hits / trace_of(trace).ideal_hit_rate(),
        })  # fmt: skip
    return rows


def _former_peer_rows() -> list[dict[str, Any]]:
    """What the record has of the peer's reports already."""
    former = json.loads((RESULTS / "routing.json").read_text())["rows"]
    return [row for row in former if row["policy"].startswith("dynamo ")]


def main(peer: Path | None, only: Sequence[str]) -> None:
    """only: names of traces, if not all."""
    wanted = [case for case in cases() if not only or case.trace in only]
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        rows = list(workers.map(simulate, wanted))
    rows += _former_peer_rows() if peer is None else peer_rows(peer)
    facts = {"machine": machine(), "objectives": asdict(OBJECTIVES), "rows": rows}
    record("routing", facts, _table(rows))
    _plot(rows, RESULTS / "routing.svg")


def _name(row: dict[str, Any]) -> str:
    routers = f", {row['routers']} routers" if row.get("routers", 1) > 1 else ""
    way = f", {row['disaggregate']}" if row.get("engines") == "paper" else ""
    return f"{row['policy']}{routers}{way}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| trace | engines | speed | router | hits of ideal | TTFT mean ms | p50 | p90 | p99 "
        "| attained |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda r: (r["trace"], r["pods"], r["speed"])):
        attained = f"{row['attained']:.1%}" if "attained" in row else ""
        lines.append(
            f"| {row['trace']} | {row['pods']}+{row['pods']} | {row['speed']} | {_name(row)} "
            f"| {row['hits_of_ideal']:.3f} | {row['ttft_mean_ms']:.0f} | {row['ttft_p50_ms']:.0f} "
            f"| {row['ttft_p90_ms']:.0f} | {row['ttft_p99_ms']:.0f} | {attained} |"
        )
    return "\n".join(lines) + "\n"


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean and p90 TTFT and hits against load, 4+4 engines."""
    figure = new_figure(15, 8)
    grid = figure.subplots(2, 3)
    whats = {"ttft_mean_ms": "TTFT mean ms", "ttft_p90_ms": "TTFT p90 ms"}
    whats["hits_of_ideal"] = "hits of the ideal"
    for line, trace in zip(grid, SPEEDS, strict=True):
        mine = [r for r in rows if (r["trace"], r["pods"]) == (trace, 4)]
        mine = [r for r in mine if r.get("engines", "mocker") == "mocker"]
        for axes, (what, label) in zip(line, whats.items(), strict=True):
            for name, look in zip(sorted({_name(row) for row in mine}), looks(), strict=False):
                points = sorted((r["speed"], r[what]) for r in mine if _name(r) == name)
                axes.plot(*zip(*points, strict=True), label=name, **look)
            axes.set_title(f"{trace}, 4+4 engines")
            axes.set_xlabel("multiple of the trace's rate")
            axes.set_ylabel(label)
            axes.set_yscale("linear" if what == "hits_of_ideal" else "log")
        line[0].legend()
    save(figure, path)
