"""What was measured, as a file: step costs of both roles, and all that lies between them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulate import hardware

from diptych.simulator.costs import StepCost
from diptych.simulator.engine import EngineLimits
from diptych.simulator.plan import Overheads, SimulatedPool, SimulatedService
from diptych_router.choosing.policies.least_loaded import POLICY
from diptych_router.choosing.policy import Policy


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything of a `SimulatedService` that has to be measured."""

    machine: str
    prefill: StepCost
    decode: StepCost
    slowdown: dict[str, float]
    """By role: how many times as long a step takes while the other role computes beside it."""
    overheads: Overheads
    limits: EngineLimits
    one_machine: bool
    errors: dict[str, list[float]]
    """By role: fitted over measured, less one, of each kind of step."""

    def plan(
        self, prefill: int, decode: int, routers: int = 1, policy: Policy = POLICY
    ) -> SimulatedService:
        return SimulatedService(
            SimulatedPool(prefill, self.prefill, self.limits, self.slowdown["prefill"]),
            SimulatedPool(decode, self.decode, self.limits, self.slowdown["decode"]),
            self.overheads,
            self.one_machine,
            routers,
            policy,
        )

    def write(self, path: Path) -> None:
        costs = {"prefill": _written(self.prefill), "decode": _written(self.decode)}
        rest = {
            "overheads": asdict(self.overheads), "limits": asdict(self.limits),
            "slowdown": self.slowdown, "one_machine": self.one_machine, "errors": self.errors,
        }  # fmt: skip
        path.write_text(json.dumps({"machine": self.machine, **costs, **rest}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises `ValueError` for a file that `write` did not write."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
            return cls(**{
                **raw,
                "prefill": _read(raw["prefill"]),
                "decode": _read(raw["decode"]),
                "overheads": Overheads(**raw["overheads"]),
                "limits": EngineLimits(**raw["limits"]),
            })  # fmt: skip
        except (KeyError, TypeError, json.JSONDecodeError) as exc:
            raise ValueError(f"{path} is no calibration: {exc}") from exc


def _written(cost: StepCost) -> dict[str, object]:
    return {
        "knots": [list(knot) for knot in cost.knots],
        "sampled_row_s": cost.sampled_row_s,
        "pair_s": cost.pair_s,
        "kv_token_s": cost.kv_token_s,
    }


def _read(raw: dict[str, Any]) -> StepCost:
    return StepCost(**{**raw, "knots": tuple((n, s) for n, s in raw["knots"])})


def on_paper(max_num_batched_tokens: int = 8192) -> Calibration:
    """An 8B model on one H200 a pod, from published rates: derived, not measured."""
    cost = hardware.step_cost()
    return Calibration(
        machine=f"{hardware.NAME}, derived from its roofline, not measured",
        prefill=cost,
        decode=cost,
        slowdown={"prefill": 1.0, "decode": 1.0},
        overheads=hardware.overheads(),
        limits=hardware.limits(max_num_batched_tokens),
        one_machine=False,
        errors={},
    )
