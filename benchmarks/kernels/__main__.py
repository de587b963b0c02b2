"""`python -m benchmarks.kernels` writes benchmarks/results/kernels.{md,json,png}.

Without a GPU it says so and ends well; `--limits` prints what an H200 could do at best, on paper.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain

import torch
from benchmarks.kernels import report
from benchmarks.kernels.cases import Sizes, Workload
from benchmarks.kernels.costs import LLAMA_3_8B
from benchmarks.kernels.measure import Row, ceilings, measured
from benchmarks.kernels.steps import step_cases
from benchmarks.machine import RESULTS, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", action="store_true", help="print the limits on paper")
    if parser.parse_args().limits:
        print(report.limits())
    elif not torch.cuda.is_available():
        print("GPU kernels: not measured, torch finds no GPU here.")
    else:
        run()


@torch.inference_mode()
def run() -> None:
    """Measure everything. Rows are written as they come; a wrong kernel's says what is wrong."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    rows: list[Row] = []
    results = {
        "machine": machine(), "device": torch.cuda.get_device_name(), "rows": rows,
        **ceilings(device),
    }  # fmt: skip
    workload, sizes = Workload(LLAMA_3_8B, device, torch.bfloat16), Sizes()
    RESULTS.mkdir(exist_ok=True)
    limits = results["bandwidth"], results["rate"]
    parts = (workload.cases(sizes), step_cases(workload, sizes))
    for row in chain.from_iterable(measured(part, *limits) for part in parts):
        rows.append(row)
        (RESULTS / "kernels.json").write_text(json.dumps(results, indent=2) + "\n")
        (RESULTS / "kernels.md").write_text(report.markdown(results))
    print(report.markdown(results))
    if not report.plot(results, RESULTS / "kernels.svg"):
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
