"""Formats the figures of a run for people: a table and charts of bars for a terminal, and pictures
for web pages. Only `draw` writes anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diptych.bench.figures import (
    BUCKETS,
    Distribution,
    Goal,
    Sent,
    Summary,
    answers,
    gaps_ms,
    rates,
)
from diptych.errors import RunError
from diptych.plots import LINES, new_figure, save
from diptych.watching import bare_table

NUM_BARS = 10
BAR_COLUMNS = 40
STEPS = " ▁▂▃▄▅▆▇█"
SHOWN_REASONS = 5


def shown(summary: Summary, sent: Sequence[Sent], goal: Goal) -> RenderableType:
    """Return the whole report, for a terminal of 80 columns."""
    samples = answers(sent)
    parts: list[RenderableType] = [_times(summary), Text(), _totals(summary, goal)]
    for reason, count in list(summary.reasons.items())[:SHOWN_REASONS]:
        parts.append(Text(f"{count} x {reason}", style="red"))
    if samples:
        parts += [
            Text(),
            histogram("time to first token", [sample.ttft_s * 1e3 for sample in samples]),
            Text(),
            histogram("pause between tokens", gaps_ms(samples)),
            Text(),
            Text(f"tokens/s over {summary.seconds:.0f} s"),
            Text(sparkline(rates(sent, summary.seconds)), style="cyan"),
        ]
    return Group(*parts)


def _times(summary: Summary) -> Table:
    numbers = ("MEAN", "P50", "P90", "P99", "MAX")
    table = bare_table("MILLISECONDS", *numbers, right=numbers, wrap=("MILLISECONDS", *numbers))
    for name, found in (
        ("time to first token", summary.ttft_ms),
        ("pause between tokens", summary.inter_token_ms),
        ("whole answer", summary.e2e_ms),
    ):
        table.add_row(name, *_cells(found))
    return table


def _cells(found: Distribution | None) -> list[str]:
    if found is None:
        return ["-"] * 5
    return [f"{x:.1f}" for x in (found.mean, found.p50, found.p90, found.p99, found.max)]


def _totals(summary: Summary, goal: Goal) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    ended = f"{summary.requests} in {summary.seconds:.1f} s, {summary.failed} failed"
    cut_off = f", {summary.cut_off} cut off" if summary.cut_off else ""
    table.add_row("requests", ended + cut_off)
    table.add_row("answers/s", f"{summary.requests_per_s:.2f}")
    if summary.prompt_tokens_per_s is not None:
        table.add_row("prompt tokens/s", f"{summary.prompt_tokens_per_s:.1f}")
    counted = " (events: the server says no numbers of tokens)" if summary.tokens_counted else ""
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}{counted}")
    if summary.cached_share is not None:
        table.add_row("prompt tokens cached", f"{summary.cached_share:.0%}")
    if goal != Goal() and summary.good is not None:
        table.add_row(
            "goodput", f"{summary.goodput_per_s:.2f}/s, {summary.good:.0%}: {_goal(goal)}"
        )
    return table


def _goal(goal: Goal) -> str:
    first = "" if goal.ttft_ms is None else f"first token in {goal.ttft_ms:g} ms"
    others = "" if goal.inter_token_ms is None else f"others {goal.inter_token_ms:g} ms each"
    return ", ".join(filter(None, (first, others)))


def histogram(title: str, values: Sequence[float]) -> RenderableType:
    """Count the values in each interval, up to the 99th percentile; the last one has the rest."""
    if not values:
        return Text(f"{title}: none")
    ordered = sorted(values)
    low, high = ordered[0], ordered[int(0.99 * (len(ordered) - 1))]
    width = (high - low) / NUM_BARS or 1.0
    counts = [0] * NUM_BARS
    for value in ordered:
        counts[min(NUM_BARS - 1, int((value - low) / width))] += 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, title=title)
    table.title_justify = "left"
    table.title_style = ""
    table.add_column(justify="right")
    table.add_column(width=BAR_COLUMNS)
    table.add_column(justify="right")
    while counts and not counts[-1]:
        counts.pop()
    for number, count in enumerate(counts):
        bar = Bar(max(counts), 0, count, width=BAR_COLUMNS, color="cyan")
        table.add_row(f"from {low + number * width:.1f} ms", bar, str(count))
    return table


def sparkline(values: Sequence[float]) -> str:
    """Draw one character for each value, higher for more; the highest one is full."""
    most = max(values, default=0.0)
    if most <= 0:
        return STEPS[0] * len(values)
    return "".join(STEPS[round(value / most * (len(STEPS) - 1))] for value in values)


def draw(path: Path, title: str, sent: Sequence[Sent], seconds: float, goal: Goal) -> None:
    """Write an SVG. Raises `RunError` if it cannot be written, `ImportError` without matplotlib."""
    figure = new_figure(12, 3.4)
    first, between, over_time = figure.subplots(1, 3)
    samples = answers(sent)
    ttfts = [sample.ttft_s * 1e3 for sample in samples]
    _shares(first, "time to first token (ms)", ttfts, goal.ttft_ms)
    _shares(between, "pause between tokens (ms)", gaps_ms(samples), None)
    width = seconds / BUCKETS
    times = [(number + 0.5) * width for number in range(BUCKETS)]
    over_time.plot(times, rates(sent, seconds), color=LINES[0])
    over_time.set_xlabel("seconds")
    over_time.set_ylabel("tokens/s")
    over_time.set_ylim(bottom=0)
    over_time.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    try:
        save(figure, path)
    except OSError as exc:
        raise RunError(f"{path}: {exc}") from exc


def _shares(axes: Any, label: str, values: Sequence[float], goal: float | None) -> None:
    """Which share of the values is no greater than each."""
    ordered = sorted(values)
    shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
    axes.step([0.0, *ordered], [0.0, *shares], where="post", color=LINES[0])
    if goal is not None:
        axes.axvline(goal, color=LINES[1], linestyle="--", label="goal")
        axes.legend(fontsize=8)
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
