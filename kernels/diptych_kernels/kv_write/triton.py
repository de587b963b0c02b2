"""Cache write: a program stores the keys and values of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from diptych_kernels.kv_write.reference import FLOAT8, FLOAT8_MAX


@triton.jit
def stored(x, kv_scale, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Convert float32 values to the cache's dtype. LIMIT is 0 for a dtype that needs no limit."""
    if LIMIT > 0:
        x = tl.clamp(x / kv_scale, -LIMIT, LIMIT)
    return x.to(dtype)


@triton.jit
def kv_write_kernel(
    keys_values_ptr, kv_ptr, blocks_ptr, offsets_ptr, kv_scale,
    token_stride, half_stride, head_stride,
    kv_block_stride, kv_half_stride, kv_slot_stride, kv_head_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BLOCK_H)  # keys of all heads, then values of all heads
    dims = tl.arange(0, BLOCK_D)
    half, head = rows // KV_HEADS, rows % KV_HEADS
    there = (rows < 2 * KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    source = token * token_stride + half * half_stride + head * head_stride
    x = tl.load(keys_values_ptr + source[:, None] + dims[None, :], mask=there, other=0.0)
    slot = tl.load(blocks_ptr + token).to(tl.int64) * kv_block_stride
    slot += tl.load(offsets_ptr + token) * kv_slot_stride
    target = slot + half * kv_half_stride + head * kv_head_stride
    x = stored(x.to(tl.float32), kv_scale, LIMIT, kv_ptr.dtype.element_ty)
    tl.store(kv_ptr + target[:, None] + dims[None, :], x, mask=there)


def kv_write(
    keys_values: Tensor, kv_layer: Tensor, blocks: Tensor, offsets: Tensor, kv_scale: float = 1.0
) -> None:
    """As the reference; heads have a contiguous last dimension."""
    num_tokens, _, kv_heads, head_dim = keys_values.shape
    kv_write_kernel[(num_tokens,)](
        keys_values, kv_layer, blocks, offsets, kv_scale,
        *keys_values.stride()[:3], *kv_layer.stride()[:4],
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, LIMIT=limit_of(kv_layer),
        BLOCK_H=triton.next_power_of_2(2 * kv_heads), BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )  # fmt: skip


def limit_of(kv_layer: Tensor) -> float:
    """Return the largest number that the cache can hold, or 0 if that never matters."""
    return FLOAT8_MAX if kv_layer.dtype is FLOAT8 else 0.0
