"""The results as Markdown, and as plots where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import looks

from diptych.plots import new_figure, save

WAYS = ("memcpy", "process_vm_readv", "cma", "tcp stream", "tcp")


def markdown(results: dict[str, Any]) -> str:
    """The whole page."""
    return "\n".join([
        "# Hand-offs", "",
        f"`python -m benchmarks.handoff` on {results['machine']}; load {results['load']} before, "
        f"{results['load_after']} after. Ways take turns; figures are medians of "
        f"{results['repetitions']}, parts are medians of quotients of neighbours in time "
        "(lowest to highest).", "",
        *speeds(results["speed"]), "", *latencies(results["latency"]), "",
    ])  # fmt: skip


def speeds(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## GB/s of the transport beside the machine's limits", "",
        f"| blocks | {' | '.join(WAYS)} | cma / process_vm_readv | tcp / tcp stream |",
        "|---|" + "---:|" * (len(WAYS) + 2),
    ]  # fmt: skip
    for row in rows:
        figures = [f"{row['gb_per_s'][way]['median']:.2f}" for way in WAYS]
        parts = [
            f"**{part['median']:.2f}** ({part['low']:.2f}-{part['high']:.2f})"
            for part in row["part_of_limit"].values()
        ]
        lines.append(f"| {row['shape']} | {' | '.join([*figures, *parts])} |")
    return lines


def latencies(results: dict[str, Any]) -> list[str]:
    lines = [
        "## Milliseconds of a hand-off between two engine cores, on a warm connection", "",
        "From P's answer to D's first step, seen by a driver in the router's place. Moving is what "
        "the transport alone takes for the same bytes; a step alone is D's first step on the same "
        "prompt when it has the KV.", "",
        "| blocks | total p50 | p99 | moving p50 | without moving p50 | p99 | a step alone p50 |",
        "|---|" + "---:|" * 6,
    ]  # fmt: skip
    for row in results["hand_offs"]:
        total, rest = row["total_ms"], row["without_moving_ms"]
        figures = [
            total["p50"], total["p99"], row["moving_ms"]["p50"], rest["p50"], rest["p99"],
            row["first_step_alone_ms"]["p50"],
        ]  # fmt: skip
        lines.append(f"| {row['blocks']} | {' | '.join(f'{value:.2f}' for value in figures)} |")
    first = results["first_contact_extra_ms"]
    lines += [
        "", f"The first hand-off of a pair takes {first['p50']:.1f} ms more than its second.", "",
        "## Milliseconds until P's blocks are free after a rejection", "",
        "From telling D to P's saying that it holds nothing, both by calls to the cores.", "",
        "| D is | times | p50 | p90 | p99 | max |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in results["rejections"]:
        figures = [f"{row['ms'][name]:.2f}" for name in ("p50", "p90", "p99", "max")]
        lines.append(f"| {row['decode_engine']} | {row['times']} | {' | '.join(figures)} |")
    return lines


def plot(results: dict[str, Any], folder: Path) -> bool:
    """Write `handoff-speed.svg`; False: there is no matplotlib."""
    try:
        figure = new_figure(10, 5)
    except ImportError:
        return False
    rows = [row for row in results["speed"] if row["scattered"] or row["count"] == 1]
    axes = figure.subplots()
    for way, look in zip(WAYS, looks(), strict=False):
        medians = [row["gb_per_s"][way]["median"] for row in rows]
        style = "-" if way in ("cma", "tcp") else "--"
        axes.plot(range(len(rows)), medians, style, label=way, **look)
    axes.set_xticks(
        range(len(rows)), [row["shape"].replace(", ", "\n") for row in rows], rotation=60
    )
    axes.set_ylabel("GB/s")
    axes.set_title("Blocks between two processes; dashed: what the machine allows")
    axes.legend()
    save(figure, folder / "handoff-speed.svg")
    return True
