"""How a case is checked and timed, and what the device can do at best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.kernels.cases import Case

Row = dict[str, Any]
Timer = Callable[[Callable[[], object]], tuple[float, float, float]]
COPY_GIB = 2
PRODUCT = 8192
TOLERANCE = 3e-2
"""Between two ways of computing in bf16: about four units in the last place of 1."""


def timed(call: Callable[[], object]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile in seconds, by the device's clock, with cold caches."""
    from triton.testing import do_bench

    median, low, high = do_bench(call, quantiles=[0.5, 0.2, 0.8])
    return median / 1e3, low / 1e3, high / 1e3


def timed_as_graph(call: Callable[[], object]) -> tuple[float, float, float]:
    """As `timed`, of many calls in one CUDA graph: without the host, and with warm caches."""
    from triton.testing import do_bench_cudagraph

    median, low, high = do_bench_cudagraph(call, quantiles=[0.5, 0.2, 0.8])
    return median / 1e3, low / 1e3, high / 1e3


def measured(
    cases: Iterator[Case], bandwidth: float, rate: float, timer: Timer = timed
) -> Iterator[Row]:
    """A row for each case. One that is wrong or fails has an `error` and costs no other its row;
    where one cannot even be made, the rest of these cases cannot either.

    A case is gone before the next one is made, because a device has no room for two of the largest.
    """
    while True:
        try:
            case = next(cases, None)
        except RuntimeError as exc:
            yield {"kernel": "those after this", "size": "", "error": told(exc)}
            return
        if case is None:
            return
        row: Row = {"kernel": case.kernel, "size": case.size}
        try:
            row |= _times(case, bandwidth, rate, timer)
        except (AssertionError, RuntimeError) as exc:  # torch's and Triton's errors are these
            row["error"] = told(exc)
        del case
        yield row


def told(error: Exception) -> str:
    """Its kind and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _times(case: Case, bandwidth: float, rate: float, timer: Timer) -> Row:
    torchs_us = None
    if case.torchs is not None:
        torch.testing.assert_close(case.ours(), case.torchs(), atol=TOLERANCE, rtol=TOLERANCE)
        torchs_us = timer(case.torchs)[0] * 1e6
    median, low, high = timer(case.ours)
    return {
        "us": median * 1e6, "us_low": low * 1e6, "us_high": high * 1e6,
        "gb_per_s": case.cost.bytes / median / 1e9,
        "share": case.cost.seconds(bandwidth, rate) / median, "torch_us": torchs_us,
    }  # fmt: skip


def ceilings(
    device: torch.device, copy_gib: float = COPY_GIB, product: int = PRODUCT, timer: Timer = timed
) -> Row:
    """What a copy moves, bytes read and written a second, and what cuBLAS computes in bf16."""
    source = torch.empty(int(copy_gib * (1 << 30)), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    factor = torch.randn(product, product, dtype=torch.bfloat16, device=device)
    return {
        "bandwidth": 2 * source.numel() / timer(lambda: target.copy_(source))[0],
        "rate": 2 * product**3 / timer(lambda: factor @ factor)[0],
    }  # fmt: skip
