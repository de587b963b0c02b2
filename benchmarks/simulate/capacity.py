"""How many requests a second a service can promise something to."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulate.traffic import Traffic, poisson

from diptych.simulator.cluster import Simulation
from diptych.simulator.costs import StepShape
from diptych.simulator.metrics import Log, Objectives, RunSummary, summarise
from diptych.simulator.plan import SimulatedPool, SimulatedService

ATTAINED = 0.95
"""Part of the requests that must get what is promised."""
STEPS = 6
"""Number of steps of the search; each about halves the interval in which the rate may lie."""
WINDOW = 0.4, 0.85
"""Part of the arrivals that count: before, pods fill up; afterwards, they empty."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What users ask for, and what they are promised."""

    name: str
    traffic: Traffic
    objectives: Objectives
    seconds: float = 20.0
    """Duration, in seconds, of the arrivals: several times as long as a request takes."""


def simulate(
    plan: SimulatedService, workload: Workload, rate: float, seed: int = 0
) -> tuple[RunSummary, Log]:
    """Poisson arrivals at this rate; the summary is of the middle of them."""
    arrivals = poisson(rate, max(100, round(rate * workload.seconds)), seed)
    log = Simulation(plan).run(workload.traffic.requests(arrivals, seed))
    begin, end = (float(arrivals[-1]) * part for part in WINDOW)
    return summarise(log, workload.objectives, begin, end), log


def goodput(plan: SimulatedService, workload: Workload) -> float:
    """The largest rate at which nearly all requests get what is promised; 0 if none does."""
    low, high = 0.0, 1.3 * estimate(plan, workload)
    for step in range(STEPS):
        rate = high * 0.7 if step == 0 else (low + high) / 2
        if simulate(plan, workload, rate)[0].attained >= ATTAINED:
            low = rate
        else:
            high = rate
    return low


def estimate(plan: SimulatedService, workload: Workload) -> float:
    """What the pools could carry if work came evenly: where a search may begin."""
    traffic, decode = workload.traffic, plan.decode
    tokens = traffic.prompt.mean + traffic.sharing.part * traffic.sharing.tokens
    prompt_s = _prompt_seconds(plan.prefill if plan.prefill.pods else decode, tokens)
    answer_s = traffic.output.mean * _row_seconds(
        decode, tokens + traffic.output.mean / 2, workload.objectives.tpot_s
    )
    if not plan.prefill.pods:
        return decode.pods / (prompt_s + answer_s)
    return min(plan.prefill.pods / prompt_s, decode.pods / answer_s)


def _prompt_seconds(pool: SimulatedPool, tokens: float) -> float:
    """Seconds that a prompt takes, computed in full steps."""
    budget = pool.limits.max_num_batched_tokens
    full = pool.cost.seconds(StepShape(budget, 1)) / budget
    return tokens * full + pool.cost.pair_s * tokens**2 / 2


def _row_seconds(pool: SimulatedPool, context: float, tpot_s: float) -> float:
    """One row's share, in seconds, of a step with as many rows as the memory and the promised
    `tpot_s` allow."""
    limits = pool.limits
    rows = min(limits.max_num_seqs, int(limits.num_blocks * limits.block_size / context))

    def seconds(rows: int) -> float:
        return pool.cost.seconds(StepShape(rows, rows, 0.0, round(rows * context)))

    while rows > 1 and seconds(rows) > tpot_s:
        rows -= 1
    return seconds(rows) / rows
