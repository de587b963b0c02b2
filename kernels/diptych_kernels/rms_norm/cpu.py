"""Normalisation in one call, for which torch needs eight operators."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.rms_norm.calls import call
from diptych_kernels.rms_norm.known_case import CASE
from diptych_kernels.trust import is_trusted

MIN_ROWS_TO_SHARE = 16
"""With fewer rows, one thread is done before a second one has begun."""


def fits(x: Tensor) -> bool:
    """Whether there is a kernel for this type and layout."""
    return x.dtype is torch.float32 and x.dim() == 2 and x.stride(1) == 1 and is_trusted(CASE, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `diptych_kernels.rms_norm.rms_norm`, for what `fits`."""
    out = torch.empty(x.shape)
    own, arguments = call(x, weight, eps, out)
    own.run(arguments, torch.get_num_threads() if x.shape[0] >= MIN_ROWS_TO_SHARE else 1)
    return out
