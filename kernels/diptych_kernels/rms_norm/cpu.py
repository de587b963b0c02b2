"""Normalisation in one call, for which torch needs eight operators."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.arguments import RmsNorm, places_of
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of
from diptych_kernels.rms_norm import reference
from diptych_kernels.trust import KnownCase, Results, is_trusted, random_values, unwritten

FLOAT = 4
"""Size in bytes."""
WEIGHT, ROWS = places_of(RmsNorm, "weight", "rows")
"""Positions of these arguments in a table's row."""
MIN_ROWS_TO_SHARE = 16
"""With fewer rows, one thread is done before a second one has begun."""
EPS = 1e-5


def call(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Call:
    """Return the call that computes `out`, [rows, n] contiguous."""
    rows, size = x.shape
    return kernel_of("rms_norm", 0), RmsNorm(
        x=x.data_ptr(),
        x_stride=x.stride(0) * FLOAT,
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        size=size,
        eps=bits_of(eps),
    )


def fits(x: Tensor) -> bool:
    """Whether there is a kernel for this type and layout."""
    return x.dtype is torch.float32 and x.dim() == 2 and x.stride(1) == 1 and is_trusted(CASE, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `diptych_kernels.rms_norm.rms_norm`, for what `fits`."""
    out = torch.empty(x.shape)
    own, arguments = call(x, weight, eps, out)
    own.run(arguments, torch.get_num_threads() if x.shape[0] >= MIN_ROWS_TO_SHARE else 1)
    return out


def _results(kernel: Kernel) -> Results:
    x, weight, out = random_values(3, 75), random_values(75), unwritten(3, 75)
    _, arguments = call(x, weight, EPS, out)
    kernel.run(arguments, 1)
    return out, reference.rms_norm(x, weight, EPS)


CASE = KnownCase("rms_norm", _results, tolerance=1e-5)
