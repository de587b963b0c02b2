"""Rotation in place: a program rotates all heads of one token, whose angles it loads once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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
def rotate_kernel(
    heads_ptr, rotations_ptr, num_heads, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    there = (head < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = heads_ptr + token * token_stride + head[:, None] * head_stride + dims[None, :]
    cos, sin = load_rotation(rotations_ptr, token, HEAD_DIM, BLOCK_D)
    x = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    y = rotated(x, cos, sin, BLOCK_H, BLOCK_D)
    tl.store(pointers, y.to(heads_ptr.dtype.element_ty), mask=there)


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Compute the same as the reference; `rotations` is contiguous."""
    num_tokens, num_heads, head_dim = heads.shape
    block_h, block_d = head_tile(num_heads, head_dim)
    rotate_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        heads, rotations, num_heads, heads.stride(0), heads.stride(1),
        HEAD_DIM=head_dim, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def head_tile(num_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the heads and dimensions that a program of four warps holds."""
    block_d = triton.next_power_of_2(head_dim)
    return min(triton.next_power_of_2(num_heads), max(1, 2048 // block_d)), block_d
