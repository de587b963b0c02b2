"""Rotation and cache write in one pass: rotated keys are written to the cache only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from diptych_kernels.rope_kv_write.reference import FLOAT8, FLOAT8_MAX, add_and_normalise_


@triton.jit
def rotated(x, cos, sin, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Multiply each pair (2i, 2i + 1) of x [H, D] by cos_i + i sin_i; cos and sin are [D / 2]."""
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_D // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (BLOCK_H, BLOCK_D))


@triton.jit
def load_rotation(rotations_ptr, token, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the cosines and sines of one token, [1, D / 2] each."""
    pairs = tl.arange(0, BLOCK_D // 2)
    there = pairs < HEAD_DIM // 2
    base = rotations_ptr + token * HEAD_DIM + 2 * pairs
    cos = tl.load(base, mask=there, other=1.0)
    sin = tl.load(base + 1, mask=there, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def stored(x, kv_scale, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Convert float32 values to the cache's dtype. LIMIT is 0 for a dtype that needs no limit."""
    if LIMIT > 0:
        x = tl.clamp(x / kv_scale, -LIMIT, LIMIT)
    return x.to(dtype)


@triton.jit
def rope_kv_write_kernel(
    heads_ptr, rotations_ptr, kv_ptr, blocks_ptr, offsets_ptr, kv_scale,
    kv_block_stride, kv_half_stride, kv_slot_stride, kv_head_stride,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    NUM_HEADS: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    in_dims = (dims < HEAD_DIM)[None, :]
    source = heads_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dims[None, :]
    x = tl.load(source, mask=(head < NUM_HEADS)[:, None] & in_dims, other=0.0).to(tl.float32)
    cos, sin = load_rotation(rotations_ptr, token, HEAD_DIM, BLOCK_D)
    turns = (head < QUERY_HEADS + KV_HEADS)[:, None]
    x = tl.where(turns, rotated(x, cos, sin, BLOCK_H, BLOCK_D), x)
    # Keys are rounded as they would be on the way through `heads`.
    x = x.to(heads_ptr.dtype.element_ty)
    tl.store(source, x, mask=(head < QUERY_HEADS)[:, None] & in_dims)
    kept = head - QUERY_HEADS
    slot = tl.load(blocks_ptr + token).to(tl.int64) * kv_block_stride
    slot += tl.load(offsets_ptr + token) * kv_slot_stride
    target = slot + (kept // KV_HEADS) * kv_half_stride + (kept % KV_HEADS) * kv_head_stride
    x = stored(x.to(tl.float32), kv_scale, LIMIT, kv_ptr.dtype.element_ty)
    in_cache = ((kept >= 0) & (head < NUM_HEADS))[:, None] & in_dims
    tl.store(kv_ptr + target[:, None] + dims[None, :], x, mask=in_cache)


def rope_kv_write(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    kv_scale: float = 1.0,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Compute the same as the reference."""
    num_tokens, num_heads, head_dim = heads.shape
    kv_heads = kv_layer.shape[3]
    add_and_normalise_(heads, kv_heads, bias, query_norm, key_norm, eps)
    # A program of four warps holds so many heads and dimensions.
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, 2048 // block_d))
    limit = FLOAT8_MAX if kv_layer.dtype is FLOAT8 else 0.0  # 0: it never matters
    rope_kv_write_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        heads, rotations, kv_layer, blocks, offsets, kv_scale, *kv_layer.stride()[:4],
        QUERY_HEADS=num_heads - 2 * kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        LIMIT=limit, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
