"""The residual sum of a layer and the normalisation that follows it."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.add_rms_norm import reference

__all__ = ["add_rms_norm"]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` [rows, n] to `residual` [rows, n] in place, and return the sum normalised and scaled
    by `weight` [n]."""
    if x.is_cuda:
        from diptych_kernels.add_rms_norm import triton

        return triton.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)
