"""Bias, norms of heads, rotation and cache write in one call, for which torch needs seven or more
small operators."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.layout import is_known
from diptych_kernels.rope_kv_write.calls import call
from diptych_kernels.rope_kv_write.known_case import CASE
from diptych_kernels.trust import is_trusted

MIN_TOKENS_TO_SHARE = 16
"""With fewer tokens, one thread is done before a second one has begun."""


def fits(heads: Tensor, kv_layer: Tensor) -> bool:
    """Whether there is a kernel for these types and this layout."""
    return (
        heads.dtype is torch.float32
        and heads.is_contiguous()
        and is_known(kv_layer)
        and is_trusted(CASE, 0)
    )


def rope_kv_write(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    """As `diptych_kernels.rope_kv_write.rope_kv_write`, for what `fits`."""
    own, arguments = call(
        heads, rotations, kv_layer, blocks, offsets, bias, query_norm, key_norm, eps
    )
    own.run(arguments, torch.get_num_threads() if heads.shape[0] >= MIN_TOKENS_TO_SHARE else 1)
