"""Compile every kernel for a Hopper GPU, as its launcher would call it, without having one.

Prints a JSON line for each: name, shared memory in bytes, and which instructions stand in it. A
process of its own, because Triton's interpreter, once chosen, is all that a process has. With two
arguments, INDEX and COUNT, it is one of so many processes that share the launches.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from diptych_kernels.block_copy.triton import gather_blocks, scatter_blocks
from diptych_kernels.native.tile_layout import LEVEL_BITS
from diptych_kernels.packed_product import gpu_tiles
from diptych_kernels.packed_product import triton as packed_product
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_kernels.paged_attention import triton as paged_attention
from diptych_kernels.rms_norm.triton import rms_norm
from diptych_kernels.rope_kv_write.reference import FLOAT8
from diptych_kernels.rope_kv_write.triton import rope_kv_write
from diptych_kernels.sampling import Filters
from diptych_kernels.sampling.triton import sample
from diptych_kernels.silu_mul.triton import silu_mul

INSTRUCTIONS = ("wgmma", "mma.sync", "cp.async", "ld.global.v4")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BLOCK_SIZE = 32, 8, 128, 4096, 16
NARROW_HEAD = 8
"""Products of matrices on a GPU have 16 dimensions at least."""
EPS = 1e-5
PROCESSORS = 132
VOCABULARY = 128256


class HopperThatOnlyCompiles:
    """What Triton asks of a device before it launches something."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


PART, PARTS = map(int, sys.argv[1:] or (0, 1))
LAUNCHES = itertools.count()


def compile_only(kernel: JITFunction, grid: Any) -> Callable[..., None]:
    """Stands in for `kernel[grid]`."""

    def run(*args: Any, **kwargs: Any) -> None:
        if next(LAUNCHES) % PARTS != PART:
            return
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        found = [name for name in INSTRUCTIONS if name in compiled.asm["ptx"]]
        shared = compiled.metadata.shared
        print(json.dumps({"kernel": kernel.fn.__name__, "shared": shared, "has": found}))

    return run


def attend(
    kv_dtype: torch.dtype, window: int | None, head_dim: int = HEAD_DIM, softcap: float = 0.0
) -> None:
    """Two long decodes and a chunk after a prefix."""
    metadata = AttentionMetadata(
        query_starts=np.array([0, 1, 2, 102]),
        context_lens=np.array([4000, 4000, 8000]),
        block_tables=np.zeros((3, 500), np.int64),
        num_decodes=2,
        block_size=BLOCK_SIZE,
        window=window,
    )
    queries = torch.empty(102, HEADS, head_dim, dtype=torch.bfloat16)
    kv_layer = cache(kv_dtype, head_dim)
    paged_attention.paged_attention(queries, kv_layer, metadata, softcap=softcap)


def multiply(tiles: torch.Tensor, rows: int) -> None:
    x, out = (torch.empty(rows, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    packed_product.packed_product(x, tiles, out, add=True)


def cache(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> torch.Tensor:
    """One layer of two."""
    return torch.empty(4, 2, 2, BLOCK_SIZE, KV_HEADS, head_dim, dtype=dtype)[:, 1]


def main() -> None:
    triton.runtime.driver.set_active(HopperThatOnlyCompiles())
    JITFunction.__getitem__ = compile_only
    paged_attention.num_processors = lambda _: PROCESSORS  # type: ignore[assignment]
    x = torch.empty(4, HIDDEN, dtype=torch.bfloat16)
    heads = torch.empty(4, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    rotations = torch.empty(4, 1, HEAD_DIM // 2, 2)
    slots = torch.arange(4), torch.arange(4)
    rms_norm(x, x[0], EPS)
    silu_mul(x)
    for dtype in (torch.bfloat16, FLOAT8):
        rope_kv_write(heads, rotations, cache(dtype), *slots)
        blocks = torch.empty(4, 2, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
        gather_blocks(blocks, slots[0], blocks)
        scatter_blocks(blocks, blocks, slots[0])
    one, where = torch.ones(4), torch.zeros(4, dtype=torch.float64)
    for filters in (None, Filters(slots[0], where, one)):
        sample(torch.empty(4, VOCABULARY), one, where, filters)
    for bits in LEVEL_BITS:
        shape = HIDDEN // gpu_tiles.COLUMNS, HIDDEN, gpu_tiles.row_bytes(bits)
        multiply(torch.empty(shape, dtype=torch.uint8), 1)
    multiply(torch.empty(shape, dtype=torch.uint8).view(FLOAT8), packed_product.FEW_ROWS)
    packed_product.unpack_rows(torch.empty(shape, dtype=torch.uint8), x, slots[0])
    attend(torch.bfloat16, None)
    attend(FLOAT8, 3000, softcap=50.0)
    attend(torch.bfloat16, None, NARROW_HEAD)


if __name__ == "__main__":
    main()
