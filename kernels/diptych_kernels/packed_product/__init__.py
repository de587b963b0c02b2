"""Products with packed matrices, which stay as small in memory as in their file.

On a GPU a matrix becomes floats of the other factor's type beside the product, which is summed up
in float32.

On a CPU, for generated tokens, the other factor is rounded to 16 bits, or to 8 where that is asked
for, with one scale for 32 values, and the products are summed up exactly, in integers. Prompts are
computed in the same way or, where the processor has a matrix unit, with both factors rounded to
bfloat16. With a matrix of floats of 16 or 8 bits everything is computed in float32, and nothing is
rounded before. A row's result depends only on which of the two it is, neither on the rows beside it
nor on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.tile_layout import TILE_ROWS, WORD_BITS, kind_for
from diptych_kernels.packed_product import cpu
from diptych_kernels.packed_product.reference import (
    FLOATS,
    kind_of,
    to_float_tiles,
    to_tiles,
    values_of,
)

__all__ = [
    "FLOATS", "TILE_ROWS", "is_available", "kind_for", "kind_of", "packed_product", "rows_of",
    "to_float_tiles", "to_tiles", "unpack_rows", "values_of",
]  # fmt: skip


def is_available(floats: torch.dtype | None = None) -> bool:
    """Whether there are kernels for this CPU, and threads to run them: for tiles of levels,
    or of `floats`."""
    return cpu.is_available() if floats is None else cpu.has_floats(FLOATS[floats])


def rows_of(tiles: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of a matrix that `rows` [n] int64 names, as from a table of embeddings.

    tiles: as `to_tiles` or `to_float_tiles` makes them; there is a kernel.
    Returns [n, columns] float32, bit for bit if float16 holds the matrix's factors. A row that the
    matrix does not have is NaN.
    """
    return cpu.rows_of(tiles, rows)


def unpack_rows(tiles: Tensor, out: Tensor, rows: Tensor | None = None) -> None:
    """Do the same as `rows_of` on a GPU, to `out` [n, columns] of any floats, each row contiguous.

    tiles: as `gpu_tiles` makes them. rows: None: the first.
    """
    from diptych_kernels.packed_product import triton

    triton.unpack_rows(tiles, out, rows)


def packed_product(
    x: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    num_decodes: int,
    add: bool = False,
    input_bits: int = WORD_BITS,
) -> None:
    """out = x matrix^T, or out += x matrix^T.

    x: [rows, columns] float32, on a GPU any floats, each row contiguous; the first `num_decodes`
        are decodes, which matters on a CPU only.
    tiles: a matrix [out, columns] as `to_tiles` or `to_float_tiles` makes it; on a GPU as those of
        `gpu_tiles` do.
    out: [rows, out] of x's type, each row contiguous.
    input_bits: what x is rounded to where products are summed up in integers: 16, or 8 if
        `cpu.rounds_to_bytes`.
    A row with a NaN or an infinity in it yields NaN or infinities.
    """
    if x.is_cuda:
        from diptych_kernels.packed_product import triton

        triton.packed_product(x, tiles, out, add=add)
        return
    cpu.packed_product(x, tiles, out, num_decodes=num_decodes, add=add, input_bits=input_bits)
