"""The lines of all stages as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.stages import STAGES

Line = dict[str, Any]


def table(lines: Sequence[Line]) -> str:
    """A section for each stage that has run, what failed first."""
    page = ["# GPU", ""]
    failed = [line for line in lines if "error" in line]
    page += ["## Failed", "", *map(row_of, failed), ""] if failed else []
    for number, stage in STAGES.items():
        own = [line for line in lines if line["stage"] == number and line["what"] != "end"]
        ends = [line for line in lines if line["stage"] == number and line["what"] == "end"]
        if ends:
            page += [f"## {number}. {stage.name}, {ends[-1]['seconds']} s", ""]
            page += [*map(row_of, own), ""]
    return "\n".join(page)


def row_of(line: Line) -> str:
    """A line as an item of a list."""
    facts = [f"{name} {told(value)}" for name, value in line.items() if name not in NAMES]
    return f"- {line['stage']}: **{line['what']}** " + "; ".join(facts)


NAMES = ("stage", "what")


def told(value: Any) -> str:
    """Four digits of a number that is none of a count."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
