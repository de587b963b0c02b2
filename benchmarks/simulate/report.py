"""Results as Markdown tables, and as plots."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import looks
from benchmarks.simulate.calibration import Calibration

from diptych.plots import new_figure, save
from diptych.simulator.metrics import RunSummary

HEAD = (
    "TTFT p50 ms | p90 | p99 | ITL p50 ms | p99 | TPOT p99 ms | tokens/s | attained | goodput/s "
    "| hit rate | failed | refused"
)


def table(load: str, results: Mapping[float, RunSummary]) -> str:
    """A row for each load."""
    lines = [f"| {load} | {HEAD} |", "|---|" + "---:|" * 12]
    for at, got in results.items():
        lines.append(
            f"| {at:g} | {got.ttft_ms['p50']:.0f} | {got.ttft_ms['p90']:.0f} "
            f"| {got.ttft_ms['p99']:.0f} | {got.itl_ms['p50']:.1f} | {got.itl_ms['p99']:.1f} "
            f"| {got.tpot_ms['p99']:.1f} | {got.output_tokens_per_s:.0f} "
            f"| {got.attained:.1%} | {got.goodput_per_s:.1f} | {got.hit_rate:.3f} | {got.failed} "
            f"| {got.refused} |"
        )
    return "\n".join(lines)


def rows_table(rows: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> list[str]:
    """Rows under the names of their figures. parts: words in the names of those that are shown in
    percent."""

    def cell(name: str, value: Any) -> str:
        if any(word in name for word in parts) and not isinstance(value, str):
            return f"{value:.1%}"
        if isinstance(value, float):
            return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        return str(value)

    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    return lines + [f"| {' | '.join(cell(name, row[name]) for name in names)} |" for row in rows]


def errors_line(measured: Calibration) -> str:
    """How well the fit describes what was measured."""
    parts = [
        f"{role}: median {statistics.median(map(abs, errors)):.1%}, "
        f"largest {max(map(abs, errors)):.1%}"
        for role, errors in measured.errors.items()
    ]
    return f"{measured.machine}; error of the fit: " + "; ".join(parts)


def plot_loads(results: Mapping[float, RunSummary], path: Path, load: str) -> None:
    """TTFT, ITL, goodput and hit rate against load."""
    figure = new_figure(16, 4)
    ttft, itl, goodput, hits = figure.subplots(1, 4)
    loads, summaries = list(results), list(results.values())
    for percent, look in zip(("p50", "p90", "p99"), looks(), strict=False):
        ttft.plot(loads, [each.ttft_ms[percent] for each in summaries], label=percent, **look)
        itl.plot(loads, [each.itl_ms[percent] for each in summaries], label=percent, **look)
    only = next(looks())
    goodput.plot(loads, [each.goodput_per_s for each in summaries], **only)
    hits.plot(loads, [each.hit_rate for each in summaries], **only)
    ttft.set_yscale("log")
    labels = ("TTFT ms", "ITL ms", "good requests/s", "hit rate")
    for axes, what in zip((ttft, itl, goodput, hits), labels, strict=True):
        axes.set_xlabel(load)
        axes.set_ylabel(what)
    ttft.legend()
    save(figure, path)


def plot_lines(
    lines: Mapping[str, Mapping[float, float]], path: Path, title: str, labels: Sequence[str]
) -> None:
    """One line for each name; labels of both axes."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for (name, points), look in zip(lines.items(), looks(), strict=False):
        axes.plot(list(points), list(points.values()), label=name, **look)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    axes.grid(alpha=0.3)
    save(figure, path)
