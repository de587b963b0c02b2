"""The results as Markdown and as a plot; and the limits on paper, which need no device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.kernels import costs
from benchmarks.kernels.costs import LLAMA_3_8B as MODEL

from diptych.plots import LINES, new_figure, save

H200_BANDWIDTH, H200_RATE = 4.8e12, 990e12
"""The vendor's figures: bytes a second, dense bf16 operations a second."""

ON_PAPER = {
    "`rms_norm`, 256 rows": costs.rms_norm(MODEL, 256),
    "`silu_mul`, 256 rows": costs.silu_mul(MODEL, 256),
    "`rope_kv_write`, 256 tokens": costs.rope_kv_write(MODEL, 256),
    "`paged_attention`, 64 decodes at 4096": costs.decode_attention(MODEL, [4096] * 64),
    "`paged_attention`, 8192 new tokens": costs.prefill_attention(MODEL, 8192, 0),
    "`paged_attention`, 2048 after 6144": costs.prefill_attention(MODEL, 2048, 6144),
    "`gather_blocks`, 256 blocks": costs.block_copy(MODEL, 256),
    "`sample`, 64 rows": costs.sampling(MODEL, 64),
    "decode step, 64 at 4096": costs.decode_step(MODEL, [4096] * 64),
    "prefill step, 8192 tokens": costs.prefill_step(MODEL, 8192),
}


def limits() -> str:
    """A table for docs/kernels.md."""
    lines = ["| kernel | MB | GFLOP | bound by | limit, us |", "|---|---:|---:|---|---:|"]
    for name, cost in ON_PAPER.items():
        by_bytes = cost.bytes / H200_BANDWIDTH >= cost.flops / H200_RATE
        lines.append(
            f"| {name} | {cost.bytes / 1e6:.2f} | {cost.flops / 1e9:.1f} | "
            f"{'bytes' if by_bytes else 'products'} | "
            f"{cost.seconds(H200_BANDWIDTH, H200_RATE) * 1e6:.1f} |"
        )
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """The whole page."""
    lines = [
        "# GPU kernels", "",
        f"`python -m benchmarks.kernels` on {results['device']}; {results['machine']}. In the same "
        f"run a copy of {results['copy_gib']} GiB moved {results['bandwidth'] / 1e12:.2f} TB/s and "
        f"a bf16 product of {results['product']} squared ran at {results['rate'] / 1e12:.0f} "
        "TFLOP/s. A kernel's share is its limit by these two over its median time; caches are "
        "flushed before each run. Every kernel was first checked against torch's result. Steps run "
        "without graphs: each kernel is launched from Python.", "",
        "| kernel | size | us (20 % - 80 %) | GB/s | share of the limit | torch, us | torch/ours |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in results["rows"]:
        if "error" in row:
            lines.append(
                f"| {row['kernel']} | {row['size']} | {row['error'].replace('|', '/')} |||||"
            )
            continue
        lines.append(
            f"| {row['kernel']} | {row['size']} | {row['us']:.1f} "
            f"({row['us_low']:.1f}-{row['us_high']:.1f}) | {row['gb_per_s']:.0f} | "
            f"**{row['share']:.2f}** | {beside(row)} |"
        )
    return "\n".join([*lines, ""])


def beside(row: dict[str, Any]) -> str:
    """torch's time and its ratio to ours, where torch was measured."""
    if row["torch_us"] is None:
        return "- | -"
    return f"{row['torch_us']:.1f} | {row['torch_us'] / row['us']:.2f}"


def plot(results: dict[str, Any], path: Path) -> bool:
    """Shares of the limit as bars; False where matplotlib is not installed."""
    rows = [row for row in results["rows"][::-1] if "error" not in row]
    try:
        figure = new_figure(8, 1 + 0.28 * len(rows))
    except ImportError:
        return False
    axes = figure.add_subplot()
    names = [f"{row['kernel']}, {row['size']}" for row in rows]
    axes.barh(names, [row["share"] for row in rows], color=LINES[0])
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"share of the limit measured on {results['device']}")
    save(figure, path)
    return True
