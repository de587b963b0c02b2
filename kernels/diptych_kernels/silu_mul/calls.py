"""The call of the kernel for the gate."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.arguments import SiluMul, places_of
from diptych_kernels.native.kernel import Call, Kernel, kernel_of

[ROWS] = places_of(SiluMul, "rows")
"""The position of the number of rows in a table's row."""


def call(gate_up: Tensor, out: Tensor) -> Call:
    """Return the call that computes `out`, [rows, n] contiguous."""
    rows, size = out.shape
    return kernel(), SiluMul(gate_up.data_ptr(), out.data_ptr(), rows, size)


@remembered
def kernel() -> Kernel:
    """Return the kernel; it is loaded at first use."""
    return kernel_of("silu_mul", 0)
