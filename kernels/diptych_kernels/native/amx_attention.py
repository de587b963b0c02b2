"""Attention of a prompt's chunk, as Numba compiles it for processors with a matrix unit.

As `prefill_attention`, but that queries, keys, weights and values are rounded to bfloat16.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from diptych_kernels.native.amx import TILE_BYTES, TILE_ROWS, block_product, configure, release
from diptych_kernels.native.attention_tile import FLOAT
from diptych_kernels.native.prefill_attention import LOG2_E, ZERO, attention, place_of
from diptych_kernels.native.prefill_chunk import PARTITION, ROWS_TOGETHER
from diptych_kernels.native.primitives import FAST, bfloat, floats, halves_of
from diptych_kernels.native.vectors import round_32

PAIR = 2
STEP = 2 * TILE_ROWS
"""Dimensions, or keys, that a tile sums over."""
ROW = PAIR * TILE_ROWS
"""Numbers in a row of a tile."""
BFLOAT = 2
"""Bytes."""

_product = block_product(1, 2)


def entry(head_dim):
    """The kernel for one size of heads."""
    return attention(head_dim, _prepare, _begin, _score, _add_values, _begin_thread, _end_thread)


@njit
def _begin_thread(memory):
    configure(memory, ROWS_TOGETHER, ROWS_TOGETHER)


@njit
def _end_thread():
    release()


@njit(error_model="numpy")
def _prepare(geometry, layout, head, part, length, dim):
    """Keys and values of a head in tiles; places behind the last hold zeros.

    keys: [keys / 16, dim / 2, 16] pairs of dimensions. values, behind the keys of all heads:
    [dim / 16, keys / 2, 16] pairs of keys.
    """
    keys, num_keys, begin = layout
    _, _, block_size, kv_heads, _ = geometry
    of_head = head * num_keys * dim
    of_keys = halves_of(keys + (of_head + (part - begin) * dim) * BFLOAT, PARTITION * dim)
    behind = kv_heads * num_keys * dim
    of_values = halves_of(keys + (behind + of_head) * BFLOAT, num_keys * dim)
    for index in range(PARTITION):
        own = index // TILE_ROWS * TILE_ROWS * dim + index % TILE_ROWS * PAIR
        pair, member = (part - begin + index) // PAIR, index % PAIR
        if part + index < length:
            place = place_of(geometry, head, part + index, dim)
            key, value = (
                floats(place, dim),
                floats(place + block_size * kv_heads * dim * FLOAT, dim),
            )
            for i in range(dim):
                of_keys[own + i // PAIR * ROW + i % PAIR] = bfloat(key[i])
                row = i // TILE_ROWS * (num_keys // PAIR) + pair
                of_values[row * ROW + i % TILE_ROWS * PAIR + member] = bfloat(value[i])
        else:
            for i in range(dim):
                of_keys[own + i // PAIR * ROW + i % PAIR] = 0
                row = i // TILE_ROWS * (num_keys // PAIR) + pair
                of_values[row * ROW + i % TILE_ROWS * PAIR + member] = 0


@njit(error_model="numpy", fastmath=FAST)
def _begin(source, queries, row, dim):
    """A row's query, scaled so that powers of two of its scores are the weights; 0: no row."""
    scaled = queries + ROWS_TOGETHER * dim * BFLOAT  # behind the rounded ones
    y = floats(scaled, dim)
    scale = np.float32(LOG2_E / math.sqrt(dim))
    if source == 0:
        for i in range(dim):
            y[i] = ZERO
    else:
        x = floats(source, dim)
        for i in range(dim):
            y[i] = x[i] * scale
    for step in range(dim // STEP):
        own = (step * TILE_ROWS + row) * STEP * BFLOAT
        round_32(scaled + step * STEP * FLOAT, queries + own)


@njit
def _score(queries, layout, head, part, part_end, scores, dim):
    """scores[row, key - part] of all rows, for the keys in whole tiles."""
    keys, num_keys, begin = layout
    own_keys = keys + (head * num_keys + part - begin) * dim * BFLOAT
    tile_keys = TILE_ROWS * dim * BFLOAT
    for first in range(0, part_end - part, STEP):
        _product(
            queries, 0, own_keys + first * dim * BFLOAT, tile_keys, dim // STEP,
            scores + first * FLOAT, PARTITION * FLOAT, 0,
        )  # fmt: skip


@njit(error_model="numpy")
def _add_values(geometry, layout, head, part, part_end, scores, weights, sums, dim):
    """sums[row] += scores[row, key - part] values[key]"""
    keys, num_keys, begin = layout
    kv_heads = geometry[3]
    steps = -(-(part_end - part) // STEP)
    for row in range(ROWS_TOGETHER):
        for step in range(steps):
            source = scores + (row * PARTITION + step * STEP) * FLOAT
            round_32(source, weights + (step * TILE_ROWS + row) * STEP * BFLOAT)
    of_dims = num_keys // STEP * TILE_BYTES
    values = keys + (kv_heads + head) * num_keys * dim * BFLOAT
    values += (part - begin) // STEP * TILE_BYTES
    for i in range(0, dim, STEP):
        _product(
            weights, 0, values + i // TILE_ROWS * of_dims, of_dims, steps,
            sums + i * FLOAT, dim * FLOAT, 1,
        )  # fmt: skip
