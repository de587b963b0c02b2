"""The packed product of many rows, as Numba compiles it for processors with a matrix unit.

`packed_product.cpu` calls it. Every stride is in bytes.
"""

from __future__ import annotations

from numba import carray, njit

from diptych_kernels.native.amx import (
    CONFIGURATION_BYTES,
    ROW_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    block_product,
    configure,
    release,
)
from diptych_kernels.native.packed_tile import FLOAT, QUAD, QUADS, group_bytes
from diptych_kernels.native.primitives import await_others, num_threads, thread_index
from diptych_kernels.native.unpacked_tile import unpack_tile
from diptych_kernels.native.vectors import round_32

GROUP = QUADS * QUAD
NUM_NUMBERS = 12


def entry(bits):
    """The kernel for a matrix whose levels have 4 or 8 bits."""
    two_by_two, two_by_one, one_by_two, one_by_one = (
        block_product(num_a, num_b) for num_a, num_b in ((2, 2), (2, 1), (1, 2), (1, 1))
    )
    unpack = unpack_tile(bits)
    of_group = group_bytes(bits)

    @njit(error_model="numpy")
    def columns_product(a, a_bytes, b, b_bytes, groups, rows, out, stride, add, two, configuration):
        """16 columns, or 32, of all rows, 32 at a time."""
        for row in range(0, rows, 2 * TILE_ROWS):
            count = min(rows - row, 2 * TILE_ROWS)
            if row == 0 or count < 2 * TILE_ROWS:
                configure(configuration, min(count, TILE_ROWS), max(count - TILE_ROWS, 1))
            own, target = a + row // TILE_ROWS * a_bytes, out + row * stride
            if count > TILE_ROWS:
                if two:
                    two_by_two(own, a_bytes, b, b_bytes, groups, target, stride, add)
                else:
                    two_by_one(own, a_bytes, b, b_bytes, groups, target, stride, add)
            elif two:
                one_by_two(own, a_bytes, b, b_bytes, groups, target, stride, add)
            else:
                one_by_one(own, a_bytes, b, b_bytes, groups, target, stride, add)

    @njit(error_model="numpy")
    def multiply(numbers):
        """What each thread does: rounds some rows, then unpacks some pairs of tiles, one after the
        other, and takes all rows through each."""
        x, x_stride, first, end, groups, tiles, num_tiles = numbers[:7]
        out, stride, add, inputs, memory = numbers[7:NUM_NUMBERS]
        thread, threads, rows = thread_index(), num_threads(), end - first
        for row in range(first + rows * thread // threads, first + rows * (thread + 1) // threads):
            _round_row(x + row * x_stride, inputs, row - first, groups)
        await_others()
        step_bytes = groups * TILE_BYTES
        configuration = memory + thread * (CONFIGURATION_BYTES + 2 * step_bytes)
        weights = configuration + CONFIGURATION_BYTES
        pairs = (num_tiles + 1) // 2
        for pair in range(pairs * thread // threads, pairs * (thread + 1) // threads):
            tile, two = tiles + 2 * pair * groups * of_group, 2 * pair + 1 < num_tiles
            unpack(tile, groups, weights)
            if two:
                unpack(tile + groups * of_group, groups, weights + step_bytes)
            target = out + first * stride + 2 * pair * ROW_BYTES
            columns_product(
                inputs, step_bytes, weights, step_bytes, groups, rows, target, stride, add, two,
                configuration,
            )  # fmt: skip
        release()

    def amx_product(numbers):
        multiply(carray(numbers, NUM_NUMBERS))

    return amx_product


@njit
def _round_row(source, inputs, row, groups):
    """Put a row where the tiles of its 16 rows are."""
    place = inputs + (row // TILE_ROWS * groups * TILE_ROWS + row % TILE_ROWS) * ROW_BYTES
    for group in range(groups):
        round_32(source + group * GROUP * FLOAT, place + group * TILE_BYTES)
