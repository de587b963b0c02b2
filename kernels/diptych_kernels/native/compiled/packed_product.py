"""The packed product for CPUs, as Numba compiles it; `packed_product.cpu` calls it.

Every stride is in bytes.
"""

from __future__ import annotations

from numba import carray, njit

from diptych_kernels.native.arguments import PackedProduct, record_of
from diptych_kernels.native.compiled.packed_tile import (
    FACTOR_BYTES,
    FLOAT,
    MOST_ROWS,
    TILES,
    TOGETHER,
    WORD,
    tile_product,
)
from diptych_kernels.native.compiled.primitives import await_others, num_threads, thread_index
from diptych_kernels.native.compiled.rounded_group import rounder
from diptych_kernels.native.compiled.vectors import LANES
from diptych_kernels.native.tile_layout import GROUP, group_bytes

ARGUMENTS = record_of(PackedProduct)


def entry(bits, size=WORD):
    """Return the kernel for a matrix whose levels have 4, 6 or 8 bits; inputs are rounded to `size`
    bytes."""
    some, last = _columns_product(TILES, bits, size), _columns_product(1, bits, size)
    of_group, of_inputs, round_group = group_bytes(bits), GROUP * size, rounder(size)

    @njit(error_model="numpy")
    def multiply(given):
        """What each thread does: rounds some groups of the input, then computes some tiles."""
        rows, groups, num_tiles = given.rows, given.groups, given.num_tiles
        stride, add, inputs, factors = given.out_stride, given.add, given.inputs, given.factors
        thread, threads = thread_index(), num_threads()
        count = rows * groups
        index, end = count * thread // threads, count * (thread + 1) // threads
        row, group = index // groups, index % groups
        while index < end:
            first, size = _block_of(row, rows)
            place = first * groups + group * size + row - first
            source = given.x + row * given.x_stride + group * GROUP * FLOAT
            of_row = min(groups - group, end - index)
            for _ in range(of_row):
                round_group(source, inputs + place * of_inputs, factors + place * FACTOR_BYTES)
                source, place = source + GROUP * FLOAT, place + size
            index, row, group = index + of_row, row + 1, 0
        await_others()
        parts = (num_tiles + TILES - 1) // TILES
        for part in range(parts * thread // threads, parts * (thread + 1) // threads):
            index = part * TILES
            tiles = given.tiles + index * groups * of_group
            target = given.out + index * LANES * FLOAT
            if index + TILES <= num_tiles:
                some(tiles, groups, inputs, factors, target, stride, add, rows)
            else:
                last(tiles, groups, inputs, factors, target, stride, add, rows)

    def packed_product(address):
        multiply(carray(address, 1, ARGUMENTS)[0])

    return packed_product


def _columns_product(num_tiles, bits, size):
    """Return a function that computes all rows of some tiles."""
    four, two, one = (tile_product(rows, num_tiles, bits, size) for rows in (TOGETHER, 2, 1))
    many = four
    if MOST_ROWS > TOGETHER:
        many = tile_product(TOGETHER, num_tiles, bits, size, in_memory=True)

    @njit
    def columns_product(tiles, groups, inputs, factors, target, stride, add, rows):
        row = 0
        while row < rows:
            count = _block_size(rows - row)
            if count > TOGETHER:
                many(tiles, groups, inputs, factors, target, stride, add, row, count)
            elif count == TOGETHER:
                four(tiles, groups, inputs, factors, target, stride, add, row, count)
            elif count == 2:
                two(tiles, groups, inputs, factors, target, stride, add, row, count)
            else:
                one(tiles, groups, inputs, factors, target, stride, add, row, count)
            row += count

    return columns_product


@njit
def _block_size(left):
    """How many of the rows that are left are computed next."""
    if left >= TOGETHER:
        return min(left // TOGETHER * TOGETHER, MOST_ROWS)
    return min(left, 2)


@njit
def _block_of(row, rows):
    """The first of the rows that a row is computed with, and how many they are."""
    first = row // MOST_ROWS * MOST_ROWS
    size = _block_size(rows - first)
    while row >= first + size:
        first += size
        size = _block_size(rows - first)
    return first, size
