"""Products with packed matrices, which stay as small in memory as in their file, on a CPU.

For generated tokens the other factor is rounded to 16 bits, with one scale for 32 values, and the
products are summed up exactly, in integers. Prompts are computed in the same way or, where the
processor has a matrix unit, with both factors rounded to bfloat16. With a matrix of floats of 16 or
8 bits everything is computed in float32, and nothing is rounded before. A row's result depends only
on which of the two it is, neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.tile_layout import TILE_ROWS, kind_for
from diptych_kernels.packed_product import cpu
from diptych_kernels.packed_product.reference import (
    FLOATS,
    to_float_tiles,
    to_tiles,
    values_of,
)

__all__ = [
    "FLOATS", "TILE_ROWS", "is_available", "kind_for", "packed_product", "rows_of",
    "to_float_tiles", "to_tiles", "values_of",
]  # fmt: skip


def is_available(floats: torch.dtype | None = None) -> bool:
    """Whether there are kernels for this processor, and threads to run them: for tiles of levels,
    or of `floats`."""
    return cpu.is_available() if floats is None else cpu.has_floats(FLOATS[floats])


def rows_of(tiles: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of a matrix that `rows` [n] int64 names, as from a table of embeddings.

    tiles: as `to_tiles` or `to_float_tiles` makes them; there is a kernel.
    Returns [n, columns] float32, bit for bit if float16 holds the matrix's factors. A row that the
    matrix does not have is NaN.
    """
    return cpu.rows_of(tiles, rows)


def packed_product(
    x: Tensor, tiles: Tensor, out: Tensor, *, num_decodes: int, add: bool = False
) -> None:
    """out = x matrix^T, or out += x matrix^T.

    x: [rows, columns] float32, each row contiguous; the first `num_decodes` are decodes.
    tiles: a matrix [out, columns] as `to_tiles` or `to_float_tiles` makes it.
    out: [rows, out] float32, each row contiguous.
    A row with a NaN or an infinity in it yields NaN or infinities.
    """
    cpu.packed_product(x, tiles, out, num_decodes=num_decodes, add=add)
