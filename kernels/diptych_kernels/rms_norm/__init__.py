"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.rms_norm import cpu, reference

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise `x` [..., n] by its root mean square and scale it by `weight` [n]."""
    if x.is_cuda:
        from diptych_kernels.rms_norm import triton

        return triton.rms_norm(x, weight, eps)
    if cpu.fits(x):
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)
