"""Copies whole KV blocks, with all their layers, to and from a contiguous buffer for
the hand-off."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.block_copy import reference

__all__ = ["gather_blocks", "scatter_blocks"]


def gather_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """staging[i] = kv_cache[block_ids[i]].

    kv_cache: [num_blocks, num_layers, 2, block_size, kv_heads, head_dim], contiguous.
    block_ids: [blocks] int64.
    staging: [blocks, num_layers, 2, block_size, kv_heads, head_dim], contiguous.
    """
    if kv_cache.is_cuda:
        from diptych_kernels.block_copy import triton

        triton.gather_blocks(kv_cache, block_ids, staging)
    else:
        reference.gather_blocks(kv_cache, block_ids, staging)


def scatter_blocks(staging: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
    """kv_cache[block_ids[i]] = staging[i], shapes as in `gather_blocks`; no id occurs twice."""
    if kv_cache.is_cuda:
        from diptych_kernels.block_copy import triton

        triton.scatter_blocks(staging, kv_cache, block_ids)
    else:
        reference.scatter_blocks(staging, kv_cache, block_ids)
