"""The packed product in one call: rounding its input, then 16 columns at a time of all rows."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
import torch
from torch import Tensor

from diptych_kernels.native.kernel import Call, Kernel, openmp
from diptych_kernels.packed_product.tiles import GROUP, PART, group_bytes

FLOAT = 4
"""Bytes."""
ROWS, TILES = 2, 4
"""Which of a call's numbers they are."""
BITS_OF = {group_bytes(bits): bits for bits in (4, 8)}


@cache
def is_available() -> bool:
    """It is written for x86-64 with AVX2 or AVX-512 VNNI."""
    return openmp() is not None and bool(llvm.get_host_cpu_features().get("avx2"))


def packed_product(x: Tensor, tiles: Tensor, out: Tensor, *, add: bool) -> None:
    """As `diptych_kernels.packed_product.packed_product`."""
    rounded = torch.empty(rounded_bytes(*x.shape), dtype=torch.int8)
    own, numbers = call(x, tiles, out, rounded, add=add)
    own.run(numbers, torch.get_num_threads())


def rounded_bytes(rows: int, columns: int) -> int:
    """What a rounded input takes: levels, then factors in float32."""
    return rows * columns + _num_factors(rows, columns) * FLOAT


def call(x: Tensor, tiles: Tensor, out: Tensor, rounded: Tensor, *, add: bool) -> Call:
    """What computes `out`, with memory for the rounded input: [>= rounded_bytes] int8."""
    rows, columns = x.shape
    num_tiles, groups, num_bytes = tiles.shape
    numbers = (
        x.data_ptr(),
        x.stride(0) * FLOAT,
        rows,
        groups,
        tiles.data_ptr(),
        num_tiles,
        out.data_ptr(),
        out.stride(0) * FLOAT,
        int(add),
        rounded.data_ptr(),
        rounded.data_ptr() + rows * columns,
    )
    return kernel(BITS_OF[num_bytes]), numbers


def _num_factors(rows: int, columns: int) -> int:
    """A scale for each part, a sum for each group."""
    return rows * (columns // PART + columns // GROUP)


@cache
def kernel(bits: int) -> Kernel:
    """For levels of so many bits; compiled when it is asked for the first time."""
    return Kernel("packed_product", bits)
