"""What roles that follow the load are worth: `python -m benchmarks.simulate roles`.

Users ask for long prompts and short answers (20:1), then for the opposite (1:4), and for long
prompts again. The same arrivals meet pods with fixed roles, and pods that turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from benchmarks.machine import RESULTS, machine
from benchmarks.simulate.calibration import on_paper
from benchmarks.simulate.traffic import LengthSpread, Traffic, poisson

from diptych.simulator.cluster import Simulation
from diptych.simulator.metrics import Log, Objectives, summarise
from diptych.simulator.workload import Request
from diptych_router.choosing.policies import POLICIES

PROMISED: Final = Objectives(1.0, 0.02)
PODS: Final = 8
PHASE_S: Final = 30.0
AGAIN_S: Final = 5.0
"""How long after the load has turned its promises may be broken."""


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    traffic: Traffic
    rate: float
    """Requests a second: about what the pods can do in the best division."""


READING: Final = Phase("20:1", Traffic(LengthSpread(8000, 0.3), LengthSpread(400, 0.3)), 17.0)
WRITING: Final = Phase("1:4", Traffic(LengthSpread(200, 0.3), LengthSpread(800, 0.3)), 100.0)
PHASES: Final = (READING, WRITING, READING)
MORE: Final = (READING, replace(WRITING, rate=130.0), READING)
"""At the end of the answers there are more streams than the pods could decode beside the prompts
that come then."""


def requests(phases: Sequence[Phase]) -> list[Request]:
    """Those of all phases, one phase after the other."""
    found = []
    for number, phase in enumerate(phases):
        arrivals = poisson(phase.rate, round(phase.rate * PHASE_S), number)
        begin = number * PHASE_S
        found += [
            replace(request, arrival=begin + request.arrival)
            for request in phase.traffic.requests(arrivals, number)
            if request.arrival < PHASE_S
        ]
    return found


def simulate(
    prefill: int, phases: Sequence[Phase] = PHASES, *, elastic: bool, routers: int = 1
) -> Log:
    plan = replace(
        on_paper().plan(prefill, PODS - prefill, 1, POLICIES["prefix_aware"]),
        disaggregate="always",
        routers=routers,
        promised_s=PROMISED.ttft_s,
        elastic_gap_s=PROMISED.tpot_s if elastic else None,
    )
    return Simulation(plan).run(requests(phases))


def kept(log: Log) -> list[float]:
    """Part of the requests of each phase that got what is promised, from `AGAIN_S` on."""
    begins = [number * PHASE_S for number in range(len(PHASES))]
    windows = [(begin + AGAIN_S * (begin > 0), begin + PHASE_S) for begin in begins]
    return [summarise(log, PROMISED, *window).attained for window in windows]


def run() -> dict[str, Any]:
    began, rows = time.monotonic(), []
    for routers, phases, prefill in product((1, 3), (PHASES, MORE), (2, 4, 5)):
        for elastic in (False, True):
            log = simulate(prefill, phases, elastic=elastic, routers=routers)
            rows.append(
                {
                    "routers": routers,
                    "requests/s": ", ".join(f"{phase.rate:g}" for phase in phases),
                    "at first": f"{prefill} prefill, {PODS - prefill} decode",
                    "roles": "elastic" if elastic else "fixed",
                    "kept": kept(log),
                    "turns": len(log.turns),
                    "failed": len(log.unanswered),
                }
            )
    facts = {"machine": machine(), "costs": on_paper().machine, "rows": rows}
    return {**facts, "seconds": time.monotonic() - began}


def main() -> None:
    results = run()
    (RESULTS / "roles.json").write_text(json.dumps(results, indent=2) + "\n")
    names = [phase.name for phase in PHASES]
    lines = [
        "# Roles that follow the load", "",
        f"`python -m benchmarks.simulate roles`, {results['seconds']:.0f} s on "
        f"{results['machine']}. Step costs: {results['costs']}. {PODS} pods. Promised: "
        f"{PROMISED.ttft_s:g} s to the first token, {PROMISED.tpot_s * 1e3:g} ms for each later "
        f"one. Each phase lasts {PHASE_S:g} s. What counts is the part of its requests that kept "
        f"both promises, from {AGAIN_S:g} s after the load has turned.", "",
        f"| routers | requests/s | at first | roles | {' | '.join(names)} | turns | failed |",
        f"|---:|---|---|---|{'---:|' * (len(names) + 2)}",
        *(
            f"| {row['routers']} | {row['requests/s']} | {row['at first']} | {row['roles']} "
            f"| {' | '.join(f'{part:.1%}' for part in row['kept'])} "
            f"| {row['turns']} | {row['failed']} |"
            for row in results["rows"]
        ),
    ]  # fmt: skip
    (RESULTS / "roles.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
