"""Attention of a chunk of a prompt, as Numba compiles it for processors with a matrix unit.

It is `bf16_prefill_attention` with other products.
"""

from __future__ import annotations

from numba import njit

from diptych_kernels.native.compiled.amx import TILE_ROWS, block_product, configure, release
from diptych_kernels.native.compiled.attention_tile import FLOAT
from diptych_kernels.native.compiled.bf16_prefill_attention import begin, prepare, values_of, weigh
from diptych_kernels.native.compiled.bf16_tile import BFLOAT, STEP
from diptych_kernels.native.compiled.prefill_attention import attention
from diptych_kernels.native.prefill_chunk import PARTITION

COLUMNS = 2 * TILE_ROWS
"""Columns that are computed together, beside each row of tiles."""


def entry(head_dim):
    """Return the kernel for one size of heads."""
    score = _score_of(head_dim)
    return attention(
        head_dim, prepare, begin, score, weigh, _add_values, _begin_thread, _end_thread
    )


@njit
def _begin_thread(memory):
    configure(memory, TILE_ROWS, TILE_ROWS)


@njit
def _end_thread():
    release()


def _products(row_bytes):
    """Return the products of 32 rows, and of 16."""
    return block_product(2, 2, row_bytes), block_product(1, 2, row_bytes)


_two, _one = _products(PARTITION * BFLOAT)


def _score_of(size):
    two, one = _products(size * BFLOAT)

    @njit
    def score(queries, num_rows, layout, head, part, part_end, scores, dim):
        """scores[row, key - part] of the rows, for the keys in whole tiles."""
        keys, num_keys, begin = layout
        own_keys = keys + (head * num_keys + part - begin) * dim * BFLOAT
        of_tile = TILE_ROWS * dim * BFLOAT
        for first in range(0, part_end - part, COLUMNS):
            tile = own_keys + first * dim * BFLOAT
            row = 0
            while row < num_rows:
                source, target = (
                    queries + row * dim * BFLOAT,
                    scores + (row * PARTITION + first) * FLOAT,
                )
                if row + TILE_ROWS < num_rows:
                    two(source, of_tile, tile, of_tile, dim // STEP, target, PARTITION * FLOAT, 0)
                else:
                    one(source, of_tile, tile, of_tile, dim // STEP, target, PARTITION * FLOAT, 0)
                row += 2 * TILE_ROWS

    return score


@njit(error_model="numpy")
def _add_values(geometry, num_rows, layout, head, part, part_end, scores, weights, sums, dim):
    """sums[row] += weights[row, key - part] values[key]"""
    values, of_dims = values_of(layout, geometry[3], head, part, dim)
    steps = -(-(part_end - part) // STEP)
    of_rows = TILE_ROWS * PARTITION * BFLOAT
    for i in range(0, dim, COLUMNS):
        tile = values + i // TILE_ROWS * of_dims
        row = 0
        while row < num_rows:
            source, target = weights + row * PARTITION * BFLOAT, sums + (row * dim + i) * FLOAT
            if row + TILE_ROWS < num_rows:
                _two(source, of_rows, tile, of_dims, steps, target, dim * FLOAT, 1)
            else:
                _one(source, of_rows, tile, of_dims, steps, target, dim * FLOAT, 1)
            row += 2 * TILE_ROWS
