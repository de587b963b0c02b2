"""`python -m benchmarks.handoff` writes benchmarks/results/handoff.{json,md} and a plot."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from typing import Any

from benchmarks.handoff import latency, report, speed
from benchmarks.handoff.shapes import all_shapes
from benchmarks.machine import RESULTS, machine, record


def run(repetitions: int, rejections: int, newcomers: int) -> dict[str, Any]:
    """Measure everything."""
    load = f"{os.getloadavg()[0]:.1f}"
    return {
        "machine": machine(),
        "load": load,
        "repetitions": repetitions,
        "speed": speed.run(all_shapes(), repetitions),
        "latency": asyncio.run(latency.run(repetitions, rejections, newcomers)),
        "load_after": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--rejections", type=int, default=90, help="in each of three situations")
    parser.add_argument("--newcomers", type=int, default=3)
    args = parser.parse_args()
    logging.disable()
    results = run(args.repetitions, args.rejections, args.newcomers)
    record("handoff", results, report.markdown(results))
    if not report.plot(results, RESULTS):
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
