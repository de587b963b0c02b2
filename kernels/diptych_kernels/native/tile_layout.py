"""The layout of a packed matrix in memory, in the order in which the kernels read it.

A tile is 16 rows of the matrix; of each group of 32 columns it holds the levels, then 16 scales and
16 offsets in float16. Levels are stored in quads, four columns of a row after each other, so that
the same quad of 16 rows fills a vector of 512 bits. Two quads of 4-bit levels share their bytes:
the first four of a group are the low halves.
"""

from __future__ import annotations

from typing import Final

TILE_ROWS: Final = 16
GROUP: Final = 32
QUAD: Final = 4
QUADS: Final = GROUP // QUAD
LEVEL_BITS: Final = (4, 8)
"""Sizes of a level, in bits, that tiles can hold."""
HALF: Final = 2
"""Size, in bytes, of a factor."""
FACTOR_BYTES: Final = 2 * TILE_ROWS * HALF
"""Size, in bytes, of the scales and offsets of one group of a tile."""


def group_bytes(bits: int) -> int:
    """Size, in bytes, of one group of a tile whose levels have `bits` bits."""
    return TILE_ROWS * GROUP * bits // 8 + FACTOR_BYTES


BF16, F16, E4M3 = 16, 17, 43
"""Kinds of tiles of floats, by the numbers of their kernels. Such a tile has, of each group, the 16
rows' values of one column after the other; if they have 8 bits, 16 scales in float32 follow."""
FLOAT_KINDS: Final = (BF16, F16, E4M3)


def float_bytes(kind: int) -> int:
    """Size, in bytes, of a value in a tile of floats."""
    return 1 if kind == E4M3 else 2


def float_group_bytes(kind: int) -> int:
    """Size, in bytes, of one group of a tile of floats."""
    scales = TILE_ROWS * 4 if kind == E4M3 else 0
    return TILE_ROWS * GROUP * float_bytes(kind) + scales
