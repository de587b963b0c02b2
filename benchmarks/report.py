"""Results as files: a JSON for each scenario, and one page and the plots made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks import aims
from benchmarks.figures import Record, names_in_order, ratio, spread
from benchmarks.scenario import Panel, Scenario

from diptych.plots import LINES, new_figure, save

PAGE = "latest.md"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def looks() -> Iterator[dict[str, Any]]:
    """Yield the style of one line after another, as arguments of matplotlib's `plot`: lines differ
    by colour and by marker."""
    for color, marker in cycle(zip(LINES, MARKERS, strict=True)):
        yield {"color": color, "marker": marker}


@dataclass(frozen=True, slots=True)
class Result:
    """A scenario as it was measured."""

    scenario: str
    machine: str
    command: str
    load_before: float
    """Processes that wanted a processor, on average of the minute before."""
    seconds: float
    records: list[Record]
    notes: list[str] = field(default_factory=list)


def write(result: Result, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(result), indent=1)
    (folder / f"{result.scenario}.json").write_text(text + "\n")


def read(folder: Path, scenarios: Sequence[Scenario]) -> dict[str, Result]:
    """Those that have been measured, in the order of the scenarios."""
    results = {}
    for scenario in scenarios:
        path = folder / f"{scenario.name}.json"
        if path.exists():
            raw = json.loads(path.read_text())
            records = [Record(**record) for record in raw.pop("records")]
            results[scenario.name] = Result(**raw, records=records)
    return results


def page(results: Mapping[str, Result], scenarios: Sequence[Scenario]) -> str:
    """All of it in Markdown."""
    measured = {name: result.records for name, result in results.items()}
    lines = [
        "# Benchmarks", "",
        "By `make bench`; how to read this is in [docs/performance.md](../../docs/performance.md). "
        "Figures are medians (lowest-highest) over the repetitions; ratios are taken within each "
        "repetition, where the systems took turns.", "",
        "## Aims", "", *aims.table(measured), "",
    ]  # fmt: skip
    for scenario in scenarios:
        if result := results.get(scenario.name):
            lines += section(scenario, result)
    lines += ["Hand-offs have [a page of their own](handoff.md).", ""]
    return "\n".join(lines)


def section(scenario: Scenario, result: Result) -> list[str]:
    plot = [f"![{scenario.title}]({scenario.name}.svg)", ""] if scenario.panels else []
    return [
        f"## {scenario.title}", "",
        scenario.about, "",
        f"`{result.command}`: {result.seconds:.0f} s on {result.machine}; "
        f"load {result.load_before:.1f} before.", "",
        *(f"- {note.splitlines()[0]}" for note in result.notes), *([""] if result.notes else []),
        *figures_table(scenario, result.records), "",
        *ratios_table(scenario, result.records), *plot,
    ]  # fmt: skip


def figures_table(scenario: Scenario, records: Sequence[Record]) -> list[str]:
    columns = [
        column
        for column in scenario.columns
        if any(column.figure in record.figures for record in records)
    ]
    headings = " | ".join(column.heading for column in columns)
    lines = [f"| case | system | {headings} |", "|---|---|" + "---:|" * len(columns)]
    for case, system in dict.fromkeys((record.case, record.system) for record in records):
        cells = []
        for column in columns:
            value = spread(records, case, system, column.figure)
            cells.append("" if value is None else value.text(column.digits))
        lines.append(f"| {case} | {system} | {' | '.join(cells)} |")
    return lines


def ratios_table(scenario: Scenario, records: Sequence[Record]) -> list[str]:
    """Empty if there is nothing to compare."""
    headings = {column.figure: column.heading for column in scenario.columns}
    lines = []
    for case in names_in_order(record.case for record in records):
        first, *others = names_in_order(r.system for r in records if r.case == case)
        for other in others:
            one, two = (other, first) if scenario.first_is_baseline else (first, other)
            values = [ratio(records, case, figure, one, two) for figure in scenario.versus]
            if any(values):
                cells = " | ".join("" if value is None else value.text(2) for value in values)
                lines.append(f"| {case} | {one} / {two} | {cells} |")
    if not lines:
        return []
    names = " | ".join(headings[figure] for figure in scenario.versus)
    head = [f"| case | ratio | {names} |", "|---|---|" + "---:|" * len(scenario.versus)]
    return [*head, *lines, ""]


def plot(scenario: Scenario, records: Sequence[Record], folder: Path) -> bool:
    """Write the scenario's panels to `NAME.svg`; False: there is no matplotlib."""
    panels = [(panel, lines) for panel in scenario.panels if (lines := lines_of(panel, records))]
    if not panels:
        return True
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    try:
        figure = new_figure(4.2 * columns, 3.3 * rows)
    except ImportError:
        return False
    headings = {column.figure: column.heading for column in scenario.columns}
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (panel, lines) in zip(grid.flat, panels, strict=False):
        for (system, points), look in zip(lines.items(), looks(), strict=False):
            axes.plot(*zip(*points, strict=True), label=system, markersize=4, **look)
        if panel.logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("{x:g}")
        else:
            axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(headings[panel.y])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, folder / f"{scenario.name}.svg")
    return True


def lines_of(panel: Panel, records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Points of each system's line: x, and the median of y."""
    chosen = [
        record
        for record in records
        if record.case.startswith(panel.cases) and {panel.x, panel.y} <= record.figures.keys()
    ]
    lines: dict[str, list[tuple[float, float]]] = {}
    for case, system in dict.fromkeys((record.case, record.system) for record in chosen):
        y = spread(chosen, case, system, panel.y)
        x = spread(chosen, case, system, panel.x)
        if x is not None and y is not None:
            lines.setdefault(system, []).append((x.median, y.median))
    return {system: sorted(points) for system, points in lines.items()}
