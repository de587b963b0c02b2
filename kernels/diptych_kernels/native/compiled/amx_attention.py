"""Attention of a chunk of a prompt, as Numba compiles it for processors with a matrix unit.

It works like `prefill_attention`, but rounds queries, keys, weights and values to bfloat16.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from diptych_kernels.native.compiled.amx import (
    TILE_BYTES,
    TILE_ROWS,
    block_product,
    configure,
    release,
)
from diptych_kernels.native.compiled.attention_tile import FLOAT
from diptych_kernels.native.compiled.cache_rows import read_halves
from diptych_kernels.native.compiled.decode_attention import LOG2_E, ZERO
from diptych_kernels.native.compiled.prefill_attention import attention, place_of
from diptych_kernels.native.compiled.primitives import FAST, floats, halves_of, words_of
from diptych_kernels.native.compiled.vectors import round_32
from diptych_kernels.native.prefill_chunk import PARTITION, ROWS_TOGETHER

PAIR = 2
STEP = 2 * TILE_ROWS
"""Dimensions, or keys, over which a tile sums."""
ROW = PAIR * TILE_ROWS
"""Numbers in a row of a tile."""
BFLOAT = 2
"""Size in bytes."""

_product = block_product(1, 2)


def entry(head_dim):
    """Return the kernel for one size of heads."""
    return attention(head_dim, _prepare, _begin, _score, _add_values, _begin_thread, _end_thread)


@njit
def _begin_thread(memory):
    configure(memory, ROWS_TOGETHER, ROWS_TOGETHER)


@njit
def _end_thread():
    release()


@njit(error_model="numpy")
def _prepare(geometry, layout, head, part, length, spare, dim):
    """Keys and values of a head in tiles; places behind the last hold zeros.

    keys: [keys / 16, dim / 2, 16] pairs of dimensions. values, behind the keys of all heads:
    [dim / 16, keys / 2, 16] pairs of keys.
    """
    keys, num_keys, begin = layout
    _, _, block_size, kv_heads, _, item = geometry
    own_keys = keys + (head * num_keys + part - begin) * dim * BFLOAT
    own_values = keys + (kv_heads + head) * num_keys * dim * BFLOAT
    own_values += (part - begin) // PAIR * ROW * BFLOAT
    of_dims = num_keys // PAIR * ROW * BFLOAT
    row, to_values = dim * BFLOAT, block_size * kv_heads * dim * item
    for first in range(0, PARTITION, PAIR):
        for member in range(PAIR):
            index, of_key = first + member, spare + PAIR * member * row
            if part + index < length:
                place = place_of(geometry, head, part + index, dim)
                read_halves(place, of_key, dim, item)
                read_halves(place + to_values, of_key + row, dim, item)
            else:
                _clear(of_key, PAIR * dim)
            tile = own_keys + index // TILE_ROWS * TILE_ROWS * row
            _place_key(of_key, tile + index % TILE_ROWS * PAIR * BFLOAT, dim)
        pair = own_values + first // PAIR * ROW * BFLOAT
        _pair_values(spare + row, spare + (PAIR + 1) * row, pair, of_dims, dim)


@njit
def _clear(target, count):
    x = halves_of(target, count)
    for i in range(count):
        x[i] = 0


@njit
def _place_key(key, target, dim):
    """Each pair of its dimensions into a row of its own."""
    x, y = words_of(key, dim // PAIR), words_of(target, dim // PAIR * TILE_ROWS)
    for i in range(dim // PAIR):
        y[i * TILE_ROWS] = x[i]


@njit
def _pair_values(first, second, target, stride, dim):
    """Values of two keys as pairs; `stride` bytes between 16 dimensions and the next ones."""
    x, y = halves_of(first, dim), halves_of(second, dim)
    for tile in range(dim // TILE_ROWS):
        z = words_of(target + tile * stride, TILE_ROWS)
        for i in range(TILE_ROWS):
            low, high = np.int32(x[tile * TILE_ROWS + i]), np.int32(y[tile * TILE_ROWS + i])
            z[i] = np.int32(low & 0xFFFF) | np.int32(high << 16)


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
