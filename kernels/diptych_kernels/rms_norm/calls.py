"""The call of the kernel for normalisation."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.arguments import RmsNorm, places_of
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of

FLOAT = 4
"""Size in bytes."""
WEIGHT, ROWS = places_of(RmsNorm, "weight", "rows")
"""Positions of these arguments in a table's row."""


def call(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Call:
    """Return the call that computes `out`, [rows, n] contiguous."""
    rows, size = x.shape
    return kernel(), RmsNorm(
        x=x.data_ptr(),
        x_stride=x.stride(0) * FLOAT,
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        size=size,
        eps=bits_of(eps),
    )


@remembered
def kernel() -> Kernel:
    """Return the kernel; it is loaded at first use."""
    return kernel_of("rms_norm", 0)
