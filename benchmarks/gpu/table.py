"""The lines of all stages as a page."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from benchmarks.gpu.stages import STAGES

Line = dict[str, Any]


def table(text: str) -> str:
    """A section for each stage that has ended, of its latest run; what failed comes first."""
    runs = latest_runs(text)
    page = ["# GPU", ""]
    failed = [line for run in runs.values() for line in run if "error" in line]
    page += ["## Failed", "", *map(row_of, failed), ""] if failed else []
    for number, run in runs.items():
        *found, end = run
        page += [f"## {number}. {STAGES[number].name}, {end['seconds']} s", ""]
        page += [*map(row_of, found), ""]
    return "\n".join(page)


def latest_runs(text: str) -> dict[int, list[Line]]:
    """By stage, the lines of its latest run that has ended; the last says so. A stage that was
    killed may have left half a line, which is skipped."""
    under_way: defaultdict[int, list[Line]] = defaultdict(list)
    ended: dict[int, list[Line]] = {}
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except ValueError:
            continue
        under_way[line["stage"]].append(line)
        if line["what"] == "end":
            ended[line["stage"]] = under_way.pop(line["stage"])
    return dict(sorted(ended.items()))


def row_of(line: Line) -> str:
    """A line as an item of a list."""
    facts = [f"{name} {told(value)}" for name, value in line.items() if name not in NAMES]
    return f"- {line['stage']}: **{line['what']}** " + "; ".join(facts)


NAMES = ("stage", "what")


def told(value: Any) -> str:
    """Four digits of a number that is none of a count."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
