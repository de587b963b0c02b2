"""`python -m benchmarks.handoff` writes benchmarks/results/handoff.{json,md} and a plot.

NIXL is measured where `--nixl-python` names an interpreter that has it; the default is ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from typing import Any

from benchmarks.handoff import latency, peers, report, speed
from benchmarks.handoff.shapes import all_shapes
from benchmarks.machine import RESULTS, machine


def run(repetitions: int, rejections: int, newcomers: int, nixl_python: str) -> dict[str, Any]:
    """Measure everything."""
    load = f"{os.getloadavg()[0]:.1f}"
    return {
        "machine": machine(),
        "load": load,
        "repetitions": repetitions,
        "speed": speed.run(all_shapes(), repetitions),
        "ucx_perftest": peers.ucx_perftest(),
        "nixl": peers.nixl(nixl_python),
        "latency": asyncio.run(latency.run(repetitions, rejections, newcomers)),
        "load_after": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--rejections", type=int, default=90, help="in each of three situations")
    parser.add_argument("--newcomers", type=int, default=3)
    parser.add_argument("--nixl-python", default=sys.executable)
    args = parser.parse_args()
    logging.disable()
    results = run(args.repetitions, args.rejections, args.newcomers, args.nixl_python)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "handoff.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "handoff.md").write_text(report.markdown(results))
    print(report.markdown(results))
    if not report.plot(results, RESULTS):
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
