"""Rows of a packed matrix for CPUs, as Numba compiles it; `packed_product.cpu` calls it."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from diptych_kernels.native.arguments import PackedRows, record_of
from diptych_kernels.native.compiled.primitives import (
    FLOAT,
    float_of,
    floats,
    halves_of,
    ints,
    num_threads,
    small_ints,
    thread_index,
)
from diptych_kernels.native.tile_layout import (
    BYTE,
    GROUP,
    HALF,
    LOW_BITS,
    QUAD,
    QUADS,
    SPANS,
    TILE_ROWS,
    TOP,
    factor_bytes,
    group_bytes,
    top_bit,
)

ARGUMENTS = record_of(PackedRows)
POWER, NAN = np.float32(2.0**112), np.float32(np.nan)
"""What the exponents of float32 are ahead of those of float16."""


def entry(bits):
    """Return the kernel for a matrix whose levels have 4, 6 or 8 bits."""
    of_group, of_factors = group_bytes(bits), factor_bytes(bits)
    span, vectors = SPANS[bits], QUADS if bits == BYTE else QUADS // 2
    mask = (1 << bits) - 1 if bits == BYTE else (1 << LOW_BITS) - 1
    has_tops = bits not in (LOW_BITS, BYTE)

    shift = njit(top_bit)

    @njit(error_model="numpy")
    def unpack(source, row, out):
        """One row of a group."""
        factors = halves_of(source + of_group - of_factors, of_factors // HALF)
        values = floats(out, GROUP)
        for quad in range(QUADS):
            place = quad * QUAD // span * 2 * TILE_ROWS + row
            scale = _float_of_half(factors[place])
            offset = _float_of_half(factors[place + TILE_ROWS])
            levels = small_ints(source + (quad % vectors * TILE_ROWS + row) * QUAD, QUAD)
            for column in range(QUAD):
                level = (np.int32(levels[column]) >> (quad // vectors * LOW_BITS)) & mask
                if has_tops:
                    place = (vectors + quad % vectors // 2) * TILE_ROWS + row
                    tops = np.int32(small_ints(source + place * QUAD, QUAD)[column])
                    level |= ((tops >> shift(quad)) & TOP) << LOW_BITS
                values[quad * QUAD + column] = np.float32(level) * scale + offset

    return rows_reader(unpack, of_group)


def rows_reader(unpack, of_group):
    """Return a kernel that calls `unpack(group, row, out)` for each row of each group."""

    @njit(error_model="numpy")
    def read(given):
        """What each thread does: some of the rows."""
        groups, thread, threads = given.groups, thread_index(), num_threads()
        rows = ints(given.rows, given.num_rows)
        for index in range(len(rows) * thread // threads, len(rows) * (thread + 1) // threads):
            tile, row = rows[index] // TILE_ROWS, rows[index] % TILE_ROWS
            out = given.out + index * groups * GROUP * FLOAT
            if not 0 <= tile < given.num_tiles:
                floats(out, groups * GROUP)[:] = NAN
                continue
            for group in range(groups):
                source = given.tiles + (tile * groups + group) * of_group
                unpack(source, row, out + group * GROUP * FLOAT)

    def packed_rows(address):
        read(carray(address, 1, ARGUMENTS)[0])

    return packed_rows


@njit
def _float_of_half(bits):
    """Return the float32 of a finite float16."""
    number = float_of((np.int32(bits) & np.int32(0x7FFF)) << 13) * POWER
    return -number if bits < 0 else number
