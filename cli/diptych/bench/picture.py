"""Draws a run for web pages: the distribution of times, and tokens over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.bench.figures import BUCKETS, Goal, Sent, answers, gaps_ms, rates
from diptych.errors import RunError
from diptych.plots import LINES, new_figure, save


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
