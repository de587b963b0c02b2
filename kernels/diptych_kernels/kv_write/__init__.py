"""Writes new keys and values into the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.kv_write import reference

__all__ = ["kv_write"]


def kv_write(
    keys_values: Tensor, kv_layer: Tensor, blocks: Tensor, offsets: Tensor, kv_scale: float = 1.0
) -> None:
    """Store the keys and values of new tokens in their slots of one layer's cache.

    keys_values: [tokens, 2, kv_heads, head_dim], keys first; any strides, but a contiguous last
        dimension.
    kv_layer: [num_blocks, 2, block_size, kv_heads, head_dim], a strided view; keeps them in its own
        dtype.
    blocks, offsets: [tokens] int64, each token's block and its place in that block; no two tokens
        share a slot.
    kv_scale: what an 8-bit cache's numbers are multiplied by to give keys and values; caches of
        other dtypes keep them as they are.
    """
    if kv_layer.is_cuda:
        from diptych_kernels.kv_write import triton

        triton.kv_write(keys_values, kv_layer, blocks, offsets, kv_scale)
    else:
        reference.kv_write(keys_values, kv_layer, blocks, offsets, kv_scale)
