"""`python -m benchmarks.kernels` writes benchmarks/results/kernels.{md,json,png}.

Without a GPU it says so and ends well; `--limits` prints what an H200 could do at best, on paper.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from benchmarks.kernels import report
from benchmarks.kernels.cases import Sizes, Workload
from benchmarks.kernels.costs import LLAMA_3_8B
from benchmarks.kernels.steps import step_cases
from benchmarks.machine import RESULTS, machine

COPY_GIB = 2
PRODUCT = 8192
TOLERANCE = 3e-2
"""Between two ways of computing in bf16: about four units in the last place of 1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", action="store_true", help="print the limits on paper")
    if parser.parse_args().limits:
        print(report.limits())
    elif not torch.cuda.is_available():
        print("GPU kernels: not measured, torch finds no GPU here.")
    else:
        results = run()
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kernels.json").write_text(json.dumps(results, indent=2) + "\n")
        (RESULTS / "kernels.md").write_text(report.markdown(results))
        print(report.markdown(results))
        if not report.plot(results, RESULTS / "kernels.svg"):
            print("no plot: matplotlib is not installed")


@torch.inference_mode()
def run() -> dict[str, Any]:
    """Measure everything. Raises `AssertionError` for a kernel whose result is wrong."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    bandwidth, rate = copy_bandwidth(device), product_rate(device)
    workload, sizes = Workload(LLAMA_3_8B, device, torch.bfloat16), Sizes()
    rows = []
    for case in chain(workload.cases(sizes), step_cases(workload, sizes)):
        torchs_us = None
        if case.torchs is not None:
            torch.testing.assert_close(case.ours(), case.torchs(), atol=TOLERANCE, rtol=TOLERANCE)
            torchs_us = timed(case.torchs)[0] * 1e6
        median, low, high = timed(case.ours)
        rows.append({
            "kernel": case.kernel, "size": case.size,
            "us": median * 1e6, "us_low": low * 1e6, "us_high": high * 1e6,
            "gb_per_s": case.cost.bytes / median / 1e9,
            "share": case.cost.seconds(bandwidth, rate) / median, "torch_us": torchs_us,
        })  # fmt: skip
    return {
        "machine": machine(), "device": torch.cuda.get_device_name(), "copy_gib": COPY_GIB,
        "product": PRODUCT, "bandwidth": bandwidth, "rate": rate, "rows": rows,
    }  # fmt: skip


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.empty(COPY_GIB << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(lambda: target.copy_(source))[0]


def product_rate(device: torch.device) -> float:
    """Operations a second of cuBLAS in bf16."""
    factor = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=device)
    return 2 * PRODUCT**3 / timed(lambda: factor @ factor)[0]


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile in seconds, by the device's clock, with cold caches."""
    from triton.testing import do_bench

    median, low, high = do_bench(call, quantiles=[0.5, 0.2, 0.8])
    return median / 1e3, low / 1e3, high / 1e3


if __name__ == "__main__":
    main()
