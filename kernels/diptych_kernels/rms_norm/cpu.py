"""Normalisation in one call, where torch's operators are eight."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of
from diptych_kernels.trust import is_trusted

FLOAT = 4
"""Bytes."""
WEIGHT, ROWS = 2, 4
"""Which of a call's numbers they are."""
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
    own, numbers = call(x, weight, eps, out)
    own.run(numbers, torch.get_num_threads() if numbers[ROWS] >= MIN_ROWS_TO_SHARE else 1)
    return out


def call(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Call:
    """What computes `out`, [rows, n] contiguous."""
    rows, size = x.shape
    stride = x.stride(0) * FLOAT
    numbers = x.data_ptr(), stride, weight.data_ptr(), out.data_ptr(), rows, size, bits_of(eps)
    return kernel(), numbers


@remembered
def kernel() -> Kernel:
    """Loaded when it is first needed."""
    return kernel_of("rms_norm", 0)
