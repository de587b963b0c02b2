"""The packed product for CPUs, as Numba compiles it; `packed_product.cpu` calls it.

Every stride is in bytes.
"""

from __future__ import annotations

from numba import carray, njit

from diptych_kernels.native.packed_tile import (
    FACTOR_BYTES,
    FLOAT,
    GROUP_BYTES,
    QUAD,
    QUADS,
    group_bytes,
    tile_product,
)
from diptych_kernels.native.primitives import await_others, num_threads, thread_index
from diptych_kernels.native.rounded_group import round_group
from diptych_kernels.native.vectors import LANES

GROUP = QUADS * QUAD
NUM_NUMBERS = 11
LARGEST_BLOCK = 8
"""Rows that are computed together, a power of two; the last ones in smaller and smaller blocks."""


def entry(bits):
    """The kernel for a matrix whose levels have 4 or 8 bits."""
    eight, four, two, one = (tile_product(num_rows, bits) for num_rows in (8, 4, 2, 1))
    of_group = group_bytes(bits)

    @njit(error_model="numpy")
    def multiply(numbers):
        """What each thread does: rounds some groups of the input, then computes some tiles."""
        x, x_stride, rows, groups, tiles, num_tiles = numbers[:6]
        out, stride, add, inputs, factors = numbers[6:NUM_NUMBERS]
        thread, threads = thread_index(), num_threads()
        count = rows * groups
        for index in range(count * thread // threads, count * (thread + 1) // threads):
            row, group = index // groups, index % groups
            first, size = _block_of(row, rows)
            place = first * groups + group * size + row - first
            source = x + row * x_stride + group * GROUP * FLOAT
            round_group(source, inputs + place * GROUP_BYTES, factors + place * FACTOR_BYTES)
        await_others()
        for index in range(num_tiles * thread // threads, num_tiles * (thread + 1) // threads):
            tile, target = tiles + index * groups * of_group, out + index * LANES * FLOAT
            row = 0
            while row + 8 <= rows:
                eight(tile, groups, inputs, factors, target, stride, add, row)
                row += 8
            if row + 4 <= rows:
                four(tile, groups, inputs, factors, target, stride, add, row)
                row += 4
            if row + 2 <= rows:
                two(tile, groups, inputs, factors, target, stride, add, row)
                row += 2
            if row < rows:
                one(tile, groups, inputs, factors, target, stride, add, row)

    def packed_product(numbers):
        multiply(carray(numbers, NUM_NUMBERS))

    return packed_product


@njit
def _block_of(row, rows):
    """The first of the rows that a row is computed with, and how many they are."""
    first, size = 0, LARGEST_BLOCK
    while row >= first + ((rows - first) & -size):  # of the rows from `first` on, those in blocks
        first += (rows - first) & -size
        size //= 2
    return first + ((row - first) & -size), size
