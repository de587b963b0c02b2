"""The gate in one call and one pass over memory that torch's operators read and write twice."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.arguments import SiluMul, places_of
from diptych_kernels.native.kernel import Call, Kernel, kernel_of
from diptych_kernels.silu_mul import reference
from diptych_kernels.trust import KnownCase, Results, is_trusted, random_values, unwritten

[ROWS] = places_of(SiluMul, "rows")
"""The position of the number of rows in a table's row."""
MIN_ROWS_TO_SHARE = 8
"""With fewer rows, one thread is done before a second one has begun."""


def call(gate_up: Tensor, out: Tensor) -> Call:
    """Return the call that computes `out`, [rows, n] contiguous."""
    rows, size = out.shape
    return kernel_of("silu_mul", 0), SiluMul(gate_up.data_ptr(), out.data_ptr(), rows, size)


def fits(gate_up: Tensor) -> bool:
    """Whether there is a kernel for this type and layout."""
    return gate_up.dtype is torch.float32 and gate_up.is_contiguous() and is_trusted(CASE, 0)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `diptych_kernels.silu_mul.silu_mul`, for what `fits`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size)
    own, arguments = call(gate_up, out)
    own.run(arguments, torch.get_num_threads() if rows >= MIN_ROWS_TO_SHARE else 1)
    return out


def _results(kernel: Kernel) -> Results:
    x, out = random_values(3, 150), unwritten(3, 75)
    _, arguments = call(x, out)
    kernel.run(arguments, 1)
    return out, reference.silu_mul(x)


CASE = KnownCase("silu_mul", _results, tolerance=1e-5)
