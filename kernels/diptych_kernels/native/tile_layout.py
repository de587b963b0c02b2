"""The layout of a packed matrix in memory, in the order in which the kernels read it.

A tile is 16 rows of the matrix. Of each group of 32 columns it holds the levels, and then, for each
span of columns that share them, 16 scales and 16 offsets in float16. The size of a level says which
of the kinds a tile is.

Levels are stored in quads, four columns of a row after each other, so that the same quad of 16 rows
fills a vector of 512 bits. Two quads of 4-bit levels share their bytes: the first four of a group
are the low halves. Levels of 6 bits are stored as those of 4 bits, followed by two vectors of their
two highest bits: byte c of quad q has them in byte c of vector `q % 4 // 2`, from bit
`top_bit(q)` on.
"""

from __future__ import annotations

from typing import Final

TILE_ROWS: Final = 16
GROUP: Final = 32
QUAD: Final = 4
QUADS: Final = GROUP // QUAD
SPANS: Final = {4: 32, 6: 16, 8: 32}
"""The kinds of tiles: the size of a level, in bits, and how many columns share a scale and an
offset."""
LEVEL_BITS: Final = tuple(SPANS)
HALF: Final = 2
"""Size, in bytes, of a factor."""
BYTE: Final = 8
WORD_BITS: Final = 2 * BYTE
"""Bits that inputs of products are rounded to, where nobody asks for a byte."""
LOW_BITS: Final = 4
"""Bits of a 6-bit level that lie where those of a 4-bit level do."""
TOP: Final = 3
"""The mask of its other two bits, when they are the lowest."""


def top_bit(quad: int) -> int:
    """Return the first bit, in a byte, of the highest two bits of a quad's 6-bit levels."""
    return quad % 2 * 2 + quad // 4 * 4


def factor_bytes(bits: int) -> int:
    """Size, in bytes, of the scales and offsets of one group of a tile."""
    return GROUP // SPANS[bits] * 2 * TILE_ROWS * HALF


def group_bytes(bits: int) -> int:
    """Size, in bytes, of one group of a tile whose levels have `bits` bits."""
    return TILE_ROWS * GROUP * bits // 8 + factor_bytes(bits)


def kind_for(bits: int, span: int) -> int | None:
    """Return the bits of the smallest tiles for levels of up to `bits` bits and spans of `span`
    columns; None if there are none."""
    fits = [own for own in LEVEL_BITS if own >= bits and SPANS[own] <= span]
    return min(fits, key=group_bytes, default=None)


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
