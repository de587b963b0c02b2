"""Normalisation in one call, where torch's operators are eight."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.arguments import RmsNorm, places_of
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of
from diptych_kernels.trust import is_trusted

FLOAT = 4
"""Bytes."""
WEIGHT, ROWS = places_of(RmsNorm, "weight", "rows")
"""Where they stand in a table's row."""
MIN_ROWS_TO_SHARE = 16
"""Fewer are done before a second thread has begun."""


def fits(x: Tensor) -> bool:
    """Whether there is a kernel, which knows this type and layout."""
    return (
        x.dtype is torch.float32 and x.dim() == 2 and x.stride(1) == 1 and is_trusted("rms_norm", 0)
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `diptych_kernels.rms_norm.rms_norm`, for what `fits`."""
    out = torch.empty(x.shape)
    own, arguments = call(x, weight, eps, out)
    own.run(arguments, torch.get_num_threads() if x.shape[0] >= MIN_ROWS_TO_SHARE else 1)
    return out


def call(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Call:
    """What computes `out`, [rows, n] contiguous."""
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
    """Loaded when it is first needed."""
    return kernel_of("rms_norm", 0)
