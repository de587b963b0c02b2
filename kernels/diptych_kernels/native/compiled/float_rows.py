"""Rows of a matrix of small floats, as Numba compiles it; `packed_product.cpu` calls it."""

from __future__ import annotations

import numpy as np
from numba import njit

from diptych_kernels.native.compiled.packed_rows import POWER, rows_reader
from diptych_kernels.native.compiled.primitives import float_of, floats, halves_of, small_ints
from diptych_kernels.native.tile_layout import BF16, E4M3, GROUP, TILE_ROWS, float_group_bytes

COUNT = GROUP * TILE_ROWS


def entry(kind):
    """Return the kernel for a matrix of floats of a kind."""
    rest, shift = (0x7F, 20) if kind == E4M3 else (0x7FFF, 13)

    @njit(error_model="numpy")
    def value_of(bits):
        """A float32; of 8 bits, without the power of two that is in the scale."""
        if kind == BF16:
            return float_of(bits << 16)
        number = float_of((bits & rest) << shift) * POWER
        return -number if bits < 0 else number

    @njit(error_model="numpy")
    def unpack(source, row, out):
        """One row of a group."""
        values = floats(out, GROUP)
        given = small_ints(source, COUNT) if kind == E4M3 else halves_of(source, COUNT)
        for column in range(GROUP):
            values[column] = value_of(np.int32(given[column * TILE_ROWS + row]))
        if kind == E4M3:
            scale = floats(source + COUNT, TILE_ROWS)[row]
            for column in range(GROUP):
                values[column] *= scale

    return rows_reader(unpack, float_group_bytes(kind))
