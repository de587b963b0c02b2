"""The packed product in one call: rounding its input, then 16 columns at a time of all rows."""

from __future__ import annotations

import ctypes
from functools import cache

import llvmlite.binding as llvm
import torch
from torch import Tensor

from diptych_kernels.native.kernel import Kernel, openmp
from diptych_kernels.packed_product.tiles import PART, group_bytes

FLOAT = 4
"""Bytes."""
NUM_NUMBERS = 11
BITS_OF = {group_bytes(bits): bits for bits in (4, 8)}


@cache
def is_available() -> bool:
    """It is written for x86-64 with AVX2 or AVX-512 VNNI."""
    return openmp() is not None and bool(llvm.get_host_cpu_features().get("avx2"))


def packed_product(x: Tensor, tiles: Tensor, out: Tensor, *, add: bool) -> None:
    """As `diptych_kernels.packed_product.packed_product`."""
    rows, columns = x.shape
    num_tiles, groups, num_bytes = tiles.shape
    num_inputs, num_factors = rows * columns, rows * (columns // PART + groups)
    rounded = torch.empty(num_inputs + num_factors * FLOAT, dtype=torch.int8)
    numbers = (ctypes.c_int64 * NUM_NUMBERS)(
        x.data_ptr(),
        x.stride(0) * FLOAT,
        rows,
        groups,
        tiles.data_ptr(),
        num_tiles,
        out.data_ptr(),
        out.stride(0) * FLOAT,
        add,
        rounded.data_ptr(),
        rounded.data_ptr() + num_inputs,
    )
    kernel(BITS_OF[num_bytes]).run(numbers, torch.get_num_threads())


@cache
def kernel(bits: int) -> Kernel:
    """For levels of so many bits; compiled when it is asked for the first time."""
    return Kernel("packed_product", bits)
