"""Bias, norms of heads, rotation and cache write in one call: for torch they are seven operators
and more, each too small to pay."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of
from diptych_kernels.native.layout import is_known
from diptych_kernels.trust import is_trusted

CACHE, BIAS, QUERY_NORM, KEY_NORM = 2, 5, 6, 7
"""Which of a call's numbers are addresses of what each layer has for itself."""
TOKENS = 9
MIN_TOKENS_TO_SHARE = 16
"""Fewer are done before a second thread has begun."""


def fits(heads: Tensor, kv_layer: Tensor) -> bool:
    """Whether there is a kernel, which knows these types and this layout."""
    return (
        heads.dtype is torch.float32
        and heads.is_contiguous()
        and is_known(kv_layer)
        and is_trusted("rope_kv_write", 0)
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
    own, numbers = call(
        heads, rotations, kv_layer, blocks, offsets, bias, query_norm, key_norm, eps
    )
    own.run(numbers, torch.get_num_threads() if numbers[TOKENS] >= MIN_TOKENS_TO_SHARE else 1)


def call(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Call:
    """What does it; for another layer too, whose addresses then go in place of these."""
    tokens, num_heads, head_dim = heads.shape
    numbers = (
        heads.data_ptr(),
        rotations.data_ptr(),
        kv_layer.data_ptr(),
        blocks.data_ptr(),
        offsets.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if query_norm is None else query_norm.data_ptr(),
        0 if key_norm is None else key_norm.data_ptr(),
        bits_of(eps),
        tokens,
        num_heads,
        kv_layer.shape[3],
        head_dim,
        kv_layer.shape[2],
        kv_layer.stride(0) * kv_layer.itemsize,
        kv_layer.itemsize,
    )
    return kernel(), numbers


@remembered
def kernel() -> Kernel:
    """Loaded when it is first needed."""
    return kernel_of("rope_kv_write", 0)
