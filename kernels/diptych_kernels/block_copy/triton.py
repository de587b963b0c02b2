"""Block copies: a program moves a run of one block's bytes, 16 at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN_BYTES = 16 << 10


@triton.jit
def copy_blocks_kernel(
    source_ptr, target_ptr, block_ids_ptr, block_elements,
    GATHER: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Programs: blocks x runs."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids_ptr + row).to(tl.int64)
    elements = tl.program_id(1) * RUN + tl.arange(0, RUN)
    there = elements < block_elements
    if GATHER:
        source, target = block, row
    else:
        source, target = row, block
    moved = tl.load(source_ptr + source * block_elements + elements, mask=there, other=0)
    tl.store(target_ptr + target * block_elements + elements, moved, mask=there)


def gather_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """As `diptych_kernels.block_copy.gather_blocks`."""
    _copy(kv_cache, staging, block_ids, gather=True)


def scatter_blocks(staging: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
    """As `diptych_kernels.block_copy.scatter_blocks`."""
    _copy(staging, kv_cache, block_ids, gather=False)


def _copy(source: Tensor, target: Tensor, block_ids: Tensor, *, gather: bool) -> None:
    # Bits are moved, whatever numbers they are.
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.itemsize]
    elements = source[0].numel()
    run = RUN_BYTES // source.itemsize
    copy_blocks_kernel[(len(block_ids), triton.cdiv(elements, run))](
        source.view(integer), target.view(integer), block_ids, elements,
        GATHER=gather, RUN=run, num_warps=8,
    )  # fmt: skip
