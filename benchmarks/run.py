"""`make bench`: measure everything and write `benchmarks/results/latest.{json,md}`."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import overhead, serving

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("ttft_ms_p50", "itl_ms_p50", "itl_ms_p99", "output_tokens_per_s")


def machine() -> str:
    """Processor, cores and commit, in a line."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    cores = sum(
        line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines()
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{model}, {cores} cores, {date.today()}, commit {commit}"


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# Benchmarks", "", f"`make bench` on {results['machine']}.", "",
        "## Engine overhead: a decode step of a 2-layer dummy model", "",
        "| batch | ms, median | ms, p90 |", "|---|---|---|",
        *(f"| {r['batch']} | {r['ms_p50']:.2f} | {r['ms_p90']:.2f} |" for r in results["overhead"]),
        "", "## Serving SmolLM2-135M-Instruct in float32, 64 output tokens", "",
        "| service | prompt / concurrency | TTFT p50 ms | ITL p50 ms | ITL p99 ms | tokens/s |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind, cells in results["serving"]["cells"].items():
        for cell, row in cells.items():
            figures = " | ".join(f"{row[column]:.1f}" for column in COLUMNS)
            lines.append(f"| {kind} | {cell} | {figures} |")
    lines += ["", "| prompt / concurrency | TTFT of 1P1D over the single engine's |", "|---|---|"]
    ratios = results["serving"]["ttft_ratio_1P1D_to_single"]
    lines += [f"| {cell} | {ratio:.2f} |" for cell, ratio in ratios.items()]
    lines += ["", "Seconds until ready: "]
    lines[-1] += ", ".join(f"{k}: {v:.1f}" for k, v in results["serving"]["ready_s"].items())
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--waves", type=int, default=1, help="requests for each concurrent user")
    args = parser.parse_args()
    results = {
        "machine": machine(),
        "overhead": overhead.run(),
        "serving": serving.run(args.repetitions, args.waves),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "latest.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "latest.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
