"""RMS norm: a program holds some whole rows in registers, so that each row is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILE = 4096
"""Elements of a program's tile, unless a single row is longer."""


@triton.jit
def normalized(x, weight, n, eps):
    """Normalise rows x [R, N] float32, zero from column n on, and multiply them by weight [N]
    float32."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / n + eps)
    return x * scale[:, None] * weight[None, :]


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, y_ptr, num_rows, inner_rows, outer_stride, inner_stride, n, eps,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_N)
    there = (rows < num_rows)[:, None] & (columns < n)[None, :]
    offsets = (rows // inner_rows) * outer_stride + (rows % inner_rows) * inner_stride
    x = tl.load(x_ptr + offsets[:, None] + columns[None, :], mask=there, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < n, other=0.0)
    y = normalized(x.to(tl.float32), weight.to(tl.float32), n, eps)
    tl.store(y_ptr + rows[:, None] * n + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the same as the reference; `x` has two or three dimensions, the last contiguous."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.shape[-1]
    num_rows = x.numel() // n
    inner_rows = x.shape[1] if x.dim() == 3 else 1
    inner_stride = x.stride(1) if x.dim() == 3 else 0
    block_r, block_n, num_warps = row_tile(n)
    rms_norm_kernel[(triton.cdiv(num_rows, block_r),)](
        x, weight, y, num_rows, inner_rows, x.stride(0), inner_stride, n, eps,
        BLOCK_R=block_r, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip
    return y


def row_tile(n: int) -> tuple[int, int, int]:
    """Return rows, columns and warps of a program, for rows of `n` elements."""
    block_n = triton.next_power_of_2(n)
    # Short rows (the heads of a query norm) share a program; long ones have one each, lest a
    # decode's few rows leave processors idle.
    block_r = max(1, MAX_TILE // 4 // block_n)
    return block_r, block_n, min(max(block_r * block_n // 512, 1), 16)
