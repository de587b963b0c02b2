"""residual += x; y = rms_norm(residual). A kernel does both in one pass over memory."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.rms_norm.reference import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` [rows, n] to `residual` [rows, n] in place, and return the sum normalised and scaled
    by `weight` [n].

    The sum is rounded to the residual's dtype before it is normalised.
    """
    return rms_norm(residual.add_(x), weight, eps)
