"""One kernel for prefill chunks and decodes over the paged cache, and the sum over splits.

The softmax runs along the keys tile by tile with a running maximum and sum (Milakov and Gimelshein,
2018; Dao et al., "FlashAttention", 2022). That the rows of a tile are tokens times the query heads
of one key head, so that short chunks and grouped heads fill a matrix product, is the idea of the
Triton attention kernel in vLLM (Ringlein et al., arXiv 2511.11581, 2025).

Names: T tokens and D dimensions of a head, M rows of a tile, N keys of a step of the loop.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych_kernels.paged_attention.gpu_schedule import HEADER, MIN_ROWS, Geometry, Schedule
from diptych_kernels.paged_attention.metadata import AttentionMetadata

MERGED_AT_ONCE = 16
"""Splits that the merging kernel loads together."""

VARIES = (
    "context_lens_at",
    "tiles_at",
    "tables_at",
    "first_tile",
    "tile_tokens",
    "window",
    "num_splits",
)
"""Numbers that change from step to step. Triton must not compile a kernel for each of their
alignments, which would stop the service again and again."""


@triton.jit
def attend(
    q, out, largest, total, kv_ptr, table_ptr, start_key, stop_key, end, position,
    kv_block_stride, kv_half_stride, kv_slot_stride, score_scale, window,
    HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the running softmax along keys from start_key to stop_key; q is [M, D], position [M].

    Without MASKED every row sees all of them. Returns out [M, D], and the largest score and the sum
    of exponentials [M].
    """
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    for start in range(start_key, stop_key, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        in_range = keys < end
        if MASKED:
            block = tl.load(table_ptr + keys // SLOTS, mask=in_range, other=0)
        else:
            block = tl.load(table_ptr + keys // SLOTS)
        slot = block.to(tl.int64) * kv_block_stride + (keys % SLOTS) * kv_slot_stride
        there = in_range[:, None] & in_dims[None, :] if MASKED else in_dims[None, :]
        k = tl.load(kv_ptr + slot[:, None] + dims[None, :], mask=there, other=0.0)  # [N, D]
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale
        if SOFTCAP > 0.0:  # scores are in units of log2(e)
            rest = tl.exp2(tl.abs(scores) * (-2.0 / SOFTCAP))
            bent = SOFTCAP * 1.4426950408889634 * (1.0 - rest) / (1.0 + rest)
            scores = tl.where(scores < 0.0, -bent, bent)
        if MASKED:
            seen = in_range[None, :] & (keys[None, :] <= position[:, None])
            if WINDOWED:
                seen &= keys[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet would subtract infinities.
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest) if MASKED else new_largest
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(kv_ptr + kv_half_stride + slot[:, None] + dims[None, :], mask=there, other=0.0)
        out = out * shrink[:, None]
        out += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        largest = new_largest
    return out, largest, total


@triton.jit(do_not_specialize=VARIES)
def attention_kernel(
    queries_ptr, kv_ptr, sinks_ptr, out_ptr, lse_ptr, numbers_ptr,
    context_lens_at, tiles_at, tables_at, first_tile, tile_tokens,
    queries_token_stride, queries_head_stride,
    kv_block_stride, kv_half_stride, kv_slot_stride, kv_head_stride,
    score_scale, value_scale, window, num_splits, HEADER: tl.constexpr,
    SHARING: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Programs: tiles x key heads x splits.

    Without SPLIT, out is [tokens, HEADS, HEAD_DIM] in the queries' dtype and lse is unused; with
    it, float32 [decodes, HEADS, num_splits, HEAD_DIM], and lse [decodes, HEADS, num_splits] gets
    the base-2 logarithm of each split's sum of exponentials.
    """
    tile = first_tile + tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    keys_per_split = tl.load(numbers_ptr)
    table_width = tl.load(numbers_ptr + 1)
    sequence = tl.load(numbers_ptr + tiles_at + 2 * tile)
    tile_start = tl.load(numbers_ptr + tiles_at + 2 * tile + 1)
    batch_start = tl.load(numbers_ptr + HEADER + sequence)
    num_new = tl.load(numbers_ptr + HEADER + sequence + 1) - batch_start
    first_position = tl.load(numbers_ptr + context_lens_at + sequence) - num_new

    tile_end = tl.minimum(tile_start + tile_tokens, num_new)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first_position + tile_start - window + 1, 0)
    end = first_position + tile_end
    if SPLIT:
        begin += split * keys_per_split
        end = tl.minimum(end, begin + keys_per_split)
        if begin >= end:
            return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    new_token = tile_start + rows // SHARING
    head = kv_head * SHARING + rows % SHARING
    real = new_token < tile_end
    position = first_position + new_token
    token = (batch_start + new_token).to(tl.int64)
    source = token * queries_token_stride + head * queries_head_stride
    there = real[:, None] & in_dims[None, :]
    q = tl.load(queries_ptr + source[:, None] + dims[None, :], mask=there, other=0.0)  # [M, D]

    table_ptr = numbers_ptr + tables_at + sequence.to(tl.int64) * table_width
    kv_ptr += kv_head * kv_head_stride
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SINKS:
        # A key that was seen before all others. It is in the first split only.
        largest = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        if SPLIT:
            largest = tl.where(split == 0, largest, -float("inf"))
        total = tl.where(largest > -float("inf"), 1.0, 0.0)
    # Keys that every row sees, in whole steps: they need no mask. What is left is a step or two.
    unmasked = begin
    if not WINDOWED:
        seen_by_all = tl.minimum(end, first_position + tile_start + 1)
        unmasked += (seen_by_all - begin) // BLOCK_N * BLOCK_N
        out, largest, total = attend(
            q, out, largest, total, kv_ptr, table_ptr, begin, unmasked, end, position,
            kv_block_stride, kv_half_stride, kv_slot_stride, score_scale, window,
            HEAD_DIM, SLOTS, WINDOWED, SOFTCAP, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    out, largest, total = attend(
        q, out, largest, total, kv_ptr, table_ptr, unmasked, end, end, position,
        kv_block_stride, kv_half_stride, kv_slot_stride, score_scale, window,
        HEAD_DIM, SLOTS, WINDOWED, SOFTCAP, True, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    # Rows past the tile's end saw nothing; they are not stored, but must not divide by zero.
    total = tl.where(real, total, 1.0)
    out = out * (value_scale / total)[:, None]
    if SPLIT:
        place = (sequence.to(tl.int64) * HEADS + head) * num_splits + split
        tl.store(lse_ptr + place, largest + tl.log2(total), mask=real)
    else:
        place = token * HEADS + head
    target = out_ptr + place[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=VARIES)
def merge_kernel(
    partial_ptr, lse_ptr, out_ptr, numbers_ptr,
    context_lens_at, window, num_splits, HEADER: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Programs: decodes x heads. The mean of the splits' results, weighted by their sums."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    visible = tl.load(numbers_ptr + context_lens_at + sequence)
    if WINDOWED:
        visible = tl.minimum(visible, window)
    used = tl.cdiv(visible, tl.load(numbers_ptr))
    row = sequence.to(tl.int64) * HEADS + head
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < HEAD_DIM
    largest = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + row * num_splits + split, mask=split < used, other=-float("inf"))
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_largest)
        shrink = tl.exp2(largest - new_largest)
        part = tl.load(
            partial_ptr + (row * num_splits + split[:, None]) * HEAD_DIM + dims[None, :],
            mask=(split < used)[:, None] & in_dims[None, :],
            other=0.0,
        )  # [S, D]
        total = total * shrink + tl.sum(weights, 0)
        out = out * shrink + tl.sum(part * weights[:, None], 0)
        largest = new_largest
    token = tl.load(numbers_ptr + HEADER + sequence).to(tl.int64)
    target = out_ptr + (token * HEADS + head) * HEAD_DIM + dims
    tl.store(target, (out / total).to(out_ptr.dtype.element_ty), mask=in_dims)


def paged_attention(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    kv_scale: float = 1.0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute the same as the reference."""
    device = queries.device
    geometry = Geometry(queries.shape[1], kv_layer.shape[3], num_processors(device))
    schedule, numbers = metadata.on_device(geometry)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=device)
    launch = _Launch(queries, kv_layer, metadata, schedule, numbers, kv_scale, sinks, softcap)
    if schedule.num_decodes:
        launch.decodes(out)
    if schedule.num_chunk_tiles:
        launch.chunks(out)
    return out


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 1 for the interpreter's."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Launch:
    """The arguments that the kernels of one call share."""

    def __init__(
        self,
        queries: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        schedule: Schedule,
        numbers: Tensor,
        kv_scale: float,
        sinks: Tensor | None,
        softcap: float,
    ) -> None:
        self._queries, self._kv_layer = queries, kv_layer
        self._schedule, self._numbers = schedule, numbers
        self._window = metadata.window
        self._kv_scale, self._sinks, self._softcap = kv_scale, sinks, softcap
        _, self._heads, self._head_dim = queries.shape
        self._kv_heads = kv_layer.shape[3]
        # A GPU makes no product of matrices with fewer dimensions.
        self._block_d = max(MIN_ROWS, triton.next_power_of_2(self._head_dim))

    def decodes(self, out: Tensor) -> None:
        """One new token each, cut along the keys if that fills the device better."""
        plan = self._schedule
        if plan.num_splits == 1:
            self._attend(out, out, 0, plan.num_decodes, 1, 1)
            return
        shape = (plan.num_decodes, self._heads, plan.num_splits)
        lse = torch.empty(shape, dtype=torch.float32, device=out.device)
        partial = torch.empty((*shape, self._head_dim), dtype=torch.float32, device=out.device)
        self._attend(partial, lse, 0, plan.num_decodes, 1, plan.num_splits)
        merge_kernel[(plan.num_decodes, self._heads)](
            partial, lse, out, self._numbers,
            plan.context_lens_at, self._window or 0, plan.num_splits, HEADER=HEADER,
            HEADS=self._heads, HEAD_DIM=self._head_dim, WINDOWED=self._window is not None,
            BLOCK_S=MERGED_AT_ONCE, BLOCK_D=self._block_d, num_warps=4,
        )  # fmt: skip

    def chunks(self, out: Tensor) -> None:
        """Several new tokens each."""
        plan = self._schedule
        geometry = Geometry(self._heads, self._kv_heads, 1)
        self._attend(out, out, plan.num_decodes, plan.num_chunk_tiles, geometry.tile_tokens, 1)

    def _attend(
        self,
        out: Tensor,
        lse: Tensor,
        first_tile: int,
        num_tiles: int,
        tile_tokens: int,
        num_splits: int,
    ) -> None:
        plan, sharing = self._schedule, self._heads // self._kv_heads
        block_m = max(MIN_ROWS, triton.next_power_of_2(tile_tokens * sharing))
        block_n, num_warps, num_stages = loop_shape(block_m, self._block_d, self._queries.dtype)
        attention_kernel[(num_tiles, self._kv_heads, num_splits)](
            self._queries, self._kv_layer, self._sinks, out, lse, self._numbers,
            plan.context_lens_at, plan.tiles_at, plan.tables_at, first_tile, tile_tokens,
            *self._queries.stride()[:2], *self._kv_layer.stride()[:4],
            # exp2 is what the hardware has.
            self._kv_scale * math.log2(math.e) / math.sqrt(self._head_dim), self._kv_scale,
            self._window or 0, num_splits, HEADER=HEADER,
            SHARING=sharing, HEADS=self._heads, HEAD_DIM=self._head_dim,
            SLOTS=self._kv_layer.shape[2], WINDOWED=self._window is not None,
            SINKS=self._sinks is not None, SOFTCAP=self._softcap, SPLIT=num_splits > 1,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=self._block_d,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip


def loop_shape(block_m: int, block_d: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the keys of a step of the loop, the warps, and the stages of its pipeline: the
    quickest on an H200.

    A prefill loads the keys and values of three steps of 32 KiB in advance. Two of its five stages
    are for the block table, which their addresses depend on. A decode has one program less for each
    step that is loaded in advance, and is faster with steps of 64 KiB and more programs.
    """
    row_bytes = block_d * dtype.itemsize
    if block_m > 64:
        return max(16, min(64, 16384 // row_bytes)), 8, 5
    return max(16, min(128, 32768 // row_bytes)), 4, 3
