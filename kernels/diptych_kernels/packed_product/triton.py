"""Products with packed matrices on a GPU: levels become floats beside the product.

For a few rows it reads a packed matrix once, which is all that such a product takes time for. The
columns are split among programs, so that enough of them read at once, and a second kernel adds up
their sums. For many rows, which arithmetic takes time for, a part of the matrix is unpacked to
memory, and torch multiplies.

Names: N outputs, M rows of x, S columns of a span.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych_kernels.native.tile_layout import SPANS
from diptych_kernels.packed_product.gpu_tiles import COLUMNS, FLOAT8, UNPACKED_BYTES, bits_of


class Shape(NamedTuple):
    """How a product is divided."""

    outputs: int
    """A program computes so many."""
    programs: int
    """About as many read at once: some on each multiprocessor."""
    warps: int
    stages: int
    """How deep loads run ahead of what is computed."""


ONE_ROW: Final = Shape(64, 1024, 4, 3)
SOME_ROWS: Final = Shape(32, 2048, 1, 3)
MORE_ROWS: Final = Shape(128, 264, 4, 3)
"""The fastest of a dozen on an H200 (benchmarks/results/gpu.md)."""
MAX_SOME_ROWS: Final = 16
"""More rows, up to `FEW_ROWS`, are multiplied as `MORE_ROWS` says."""
FEW_ROWS: Final = 128
"""Up to so many rows the packed matrix is multiplied as it is."""
MIN_ROWS: Final = 8
"""Fewer take a product of matrices as long."""
ROWS: Final = 32
"""A program unpacks so many."""
SUMS: Final = 512
"""A program adds up so many."""
EXPONENT: Final = 139 << 23
"""The bits of 4096.0."""
WIDTH = tl.constexpr(COLUMNS)


@triton.jit
def unpacked(
    block_ptr, exponent, outputs, in_range, n,
    LANE: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, IS_FLOAT: tl.constexpr,
):  # fmt: skip
    """Return [N, S] float32, the columns of a lane, of a block of `gpu_tiles`.

    exponent: the bits of 4096.0. As an argument they are in a register, so that one instruction
    takes a level out of its word and puts it into a float's fraction.
    """
    places = outputs[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    there = in_range[:, None]
    factor_ptr = (block_ptr + n * (WIDTH * BITS // 8)).to(tl.pointer_type(tl.int32))
    factors = tl.load(factor_ptr + LANE * n + outputs, mask=in_range, other=0)
    if BITS == 4:
        words_ptr = block_ptr.to(tl.pointer_type(tl.int16))
    else:
        words_ptr = block_ptr.to(tl.pointer_type(tl.int32))
    words = tl.load(words_ptr + places, mask=there, other=0).to(tl.int32)
    if IS_FLOAT:
        words >>= 8 * LANE
        half = ((words & 128) << 8 | (words & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        values = half.to(tl.float32) * factors.to(tl.float32, bitcast=True)[:, None]
    else:
        LOW_BITS: tl.constexpr = 8 if BITS == 8 else 4
        AT: tl.constexpr = LANE * LOW_BITS % 8
        LEFT: tl.constexpr = 11 - LANE * LOW_BITS // 8 * 8
        moved = words << LEFT if LEFT > 0 else words >> -LEFT
        bits = moved & (((1 << LOW_BITS) - 1) << (11 + AT)) | (exponent - (AT << 23))
        if BITS == 6:
            tops_ptr = (block_ptr + n * (WIDTH // 2)).to(tl.pointer_type(tl.int16))
            tops = tl.load(tops_ptr + places, mask=there, other=0).to(tl.int32)
            bits |= tops << (15 + AT - LANE % 4 * 4 - LANE // 4 * 2) & 3 << (15 + AT)
        scale = factors.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = (factors >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset -= (4096 >> AT) * scale
        values = bits.to(tl.float32, bitcast=True) * scale[:, None] + offset[:, None]
    return values


@triton.jit(do_not_specialize=["exponent", "rows"])
def product_kernel(
    x_ptr, tiles_ptr, out_ptr, exponent, rows, n, columns, blocks, blocks_of_split,
    x_stride, out_stride, split_stride, ADD: tl.constexpr,
    ROW_BYTES: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, IS_FLOAT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: N / BLOCK_N x splits of the columns."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = outputs < n
    row = tl.arange(0, BLOCK_M)
    real = row < rows
    first = tl.program_id(1) * blocks_of_split
    block_ptr = tiles_ptr + first.to(tl.int64) * n * ROW_BYTES
    last = tl.minimum(first + blocks_of_split, blocks)
    sums = tl.zeros([BLOCK_N, SPAN if BLOCK_M == 1 else BLOCK_M], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        for lane in tl.static_range(WIDTH // SPAN):
            w = unpacked(block_ptr, exponent, outputs, in_range, n, lane, BITS, SPAN, IS_FLOAT)
            column = block * WIDTH + lane * SPAN + tl.arange(0, SPAN)
            if BLOCK_M == 1:
                x = tl.load(x_ptr + column, mask=column < columns, other=0.0)
                sums += w * x.to(tl.float32)[None, :]
            else:
                there = (column < columns)[:, None] & real[None, :]
                places = column[:, None] + row[None, :] * x_stride
                x = tl.load(x_ptr + places, mask=there, other=0.0)
                sums = tl.dot(w.to(x.dtype), x, sums, input_precision="ieee")
        block_ptr += n * ROW_BYTES
    if BLOCK_M == 1:
        sums = tl.sum(sums, 1)[:, None]
    there = in_range[:, None] & real[None, :]
    out_ptr += tl.program_id(1) * split_stride
    target = out_ptr + outputs[:, None] + row[None, :] * out_stride
    if ADD:
        sums += tl.load(target, mask=there, other=0.0).to(tl.float32)
    tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def sum_kernel(
    parts_ptr, out_ptr, n, splits, split_stride, out_stride,
    ADD: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: rows x N / BLOCK."""
    row = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    in_range = outputs < n
    there = (split < splits)[:, None] & in_range[None, :]
    parts = parts_ptr + split[:, None] * split_stride + row * n + outputs[None, :]
    sums = tl.sum(tl.load(parts, mask=there, other=0.0), 0)
    target = out_ptr + row * out_stride + outputs
    if ADD:
        sums += tl.load(target, mask=in_range, other=0.0).to(tl.float32)
    tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=in_range)


@triton.jit(do_not_specialize=["exponent", "first", "count"])
def rows_kernel(
    numbers_ptr, tiles_ptr, out_ptr, exponent, first, count, n, columns, row_stride,
    ROW_BYTES: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, IS_FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: rows / BLOCK x blocks. Without numbers, the rows are those from the first on."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = first + row
    if numbers_ptr is not None:
        numbers = tl.load(numbers_ptr + row, mask=row < count, other=-1).to(tl.int32)
    in_range = (numbers >= 0) & (numbers < n)
    block = tl.program_id(1)
    block_ptr = tiles_ptr + block.to(tl.int64) * n * ROW_BYTES
    for lane in tl.static_range(WIDTH // SPAN):
        w = unpacked(block_ptr, exponent, numbers, in_range, n, lane, BITS, SPAN, IS_FLOAT)
        w = tl.where(in_range[:, None], w, float("nan"))
        column = block * WIDTH + lane * SPAN + tl.arange(0, SPAN)
        there = (row < count)[:, None] & (column < columns)[None, :]
        target = out_ptr + row.to(tl.int64)[:, None] * row_stride + column[None, :]
        tl.store(target, w.to(out_ptr.dtype.element_ty), mask=there)


def unpack_rows(tiles: Tensor, out: Tensor, numbers: Tensor | None = None, first: int = 0) -> None:
    """As `diptych_kernels.packed_product.unpack_rows`."""
    blocks, n, _ = tiles.shape
    rows_kernel[(triton.cdiv(len(out), ROWS), blocks)](
        numbers, tiles.view(torch.uint8), out, EXPONENT, first, len(out), n, out.shape[1],
        out.stride(0),
        **_kind(tiles), BLOCK=ROWS, num_warps=4,
    )  # fmt: skip


def packed_product(x: Tensor, tiles: Tensor, out: Tensor, *, add: bool) -> None:
    """As `diptych_kernels.packed_product.packed_product`."""
    if len(x) > FEW_ROWS:
        _unpacked_product(x, tiles, out, add=add)
        return
    blocks, n, _ = tiles.shape
    shape = ONE_ROW if len(x) == 1 else SOME_ROWS if len(x) <= MAX_SOME_ROWS else MORE_ROWS
    programs = triton.cdiv(n, shape.outputs)
    of_split = triton.cdiv(blocks, max(1, shape.programs // programs))
    splits = triton.cdiv(blocks, of_split)
    block_m = 1 if len(x) == 1 else max(MIN_ROWS, triton.next_power_of_2(len(x)))
    parts = out
    if splits > 1:
        parts = torch.empty(splits, len(x), n, dtype=torch.float32, device=x.device)
    product_kernel[(programs, splits)](
        x, tiles.view(torch.uint8), parts, EXPONENT, len(x), n, x.shape[1], blocks, of_split,
        x.stride(0), parts.stride(-2), parts.stride(0), ADD=add and splits == 1, **_kind(tiles),
        BLOCK_N=shape.outputs, BLOCK_M=block_m, STAGES=shape.stages,
        num_warps=shape.warps,
    )  # fmt: skip
    if splits > 1:
        sum_kernel[(len(x), triton.cdiv(n, SUMS))](
            parts, out, n, splits, parts.stride(0), out.stride(0),
            ADD=add, SPLITS=triton.next_power_of_2(splits), BLOCK=SUMS, num_warps=4,
        )  # fmt: skip


def _unpacked_product(x: Tensor, tiles: Tensor, out: Tensor, *, add: bool) -> None:
    """The same, some outputs after the other."""
    n, columns = tiles.shape[1], x.shape[1]
    at_once = max(1, UNPACKED_BYTES // (columns * x.itemsize))
    room = x.new_empty(min(n, at_once), columns)
    for first in range(0, n, at_once):
        weight, own = room[: n - first], out[:, first : first + at_once]
        unpack_rows(tiles, weight, first=first)
        if add:
            own.addmm_(x, weight.t())
        else:
            torch.mm(x, weight.t(), out=own)


def _kind(tiles: Tensor) -> dict[str, int]:
    bits = bits_of(tiles)
    return {
        "ROW_BYTES": tiles.shape[2], "BITS": bits, "SPAN": SPANS[bits],
        "IS_FLOAT": tiles.dtype is FLOAT8,
    }  # fmt: skip
