"""Rotary position embedding."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.rope import reference

__all__ = ["rotate_"]


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotate query and key heads in place.

    heads: [tokens, heads, head_dim], last dimension contiguous, any other strides.
    rotations: [tokens, 1, head_dim / 2, 2] float32, the (cos, sin) of each token's position.
    """
    if heads.is_cuda:
        from diptych_kernels.rope import triton

        triton.rotate_(heads, rotations)
    else:
        reference.rotate_(heads, rotations)
