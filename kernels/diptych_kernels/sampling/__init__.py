"""Draws tokens from filtered distributions."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.sampling import reference
from diptych_kernels.sampling.reference import Filters

__all__ = ["Filters", "sample"]


def sample(logits: Tensor, temperature: Tensor, where: Tensor, filters: Filters | None) -> Tensor:
    """Draw a token for each row from the filtered softmax of its logits over its temperature, at a
    given point of the cumulative distribution.

    Every row is computed by itself: its token depends neither on its neighbours nor on its place in
    the batch.

    logits: [rows, vocabulary] float32, -inf where a token is excluded; some finite in each row.
    temperature: [rows] float32, above 0.
    where: [rows] float64 in [0, 1), multiples of 2^-40.
    filters: None if no row has any.
    Returns [rows] int64. A token of probability 0 is never drawn.
    """
    if logits.is_cuda:
        from diptych_kernels.sampling import triton

        return triton.sample(logits, temperature, where, filters)
    return reference.sample(logits, temperature, where, filters)
