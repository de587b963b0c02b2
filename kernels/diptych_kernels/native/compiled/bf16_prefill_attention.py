"""Attention of a chunk of a prompt in bfloat16, for processors that multiply pairs of such numbers.

It works like `prefill_attention`, but rounds queries, keys, weights and values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from diptych_kernels.native.compiled.attention_tile import (
    COLUMNS,
    FLOAT,
    FOR_HALVES,
    ROWS,
    UNIT,
    row_product,
)
from diptych_kernels.native.compiled.bf16_tile import BFLOAT, PAIR, STEP
from diptych_kernels.native.compiled.cache_rows import read_halves
from diptych_kernels.native.compiled.prefill_attention import (
    attention,
    nothing,
    nothing_more,
    place_of,
    scale,
    weighing,
)
from diptych_kernels.native.compiled.primitives import halves_of, words_of
from diptych_kernels.native.compiled.vectors import LANES, round_32
from diptych_kernels.native.prefill_chunk import PARTITION

_product = row_product(in_pairs=True)
weigh = weighing(FOR_HALVES, to_halves=True)


def entry(head_dim):
    """Return the kernel for one size of heads."""
    return attention(head_dim, prepare, begin, _score, weigh, _add_values, nothing, nothing_more)


@njit(error_model="numpy")
def prepare(geometry, layout, head, part, length, spare, dim):
    """Keys and values of a head in tiles; places behind the last hold zeros.

    keys: [keys / 16, dim / 2, 16] pairs of dimensions. values, behind the keys of all heads:
    [dim / 16, keys / 2, 16] pairs of keys.
    """
    keys, num_keys, begin = layout
    _, _, block_size, kv_heads, _, item = geometry
    own_keys = keys + (head * num_keys + part - begin) * dim * BFLOAT
    own_values, of_dims = values_of(layout, kv_heads, head, part, dim)
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
            tile = own_keys + index // LANES * LANES * row
            _place_key(of_key, tile + index % LANES * UNIT, dim)
        pair = own_values + first // PAIR * LANES * UNIT
        _pair_values(spare + row, spare + (PAIR + 1) * row, pair, of_dims, dim)


@njit
def values_of(layout, kv_heads, head, part, dim):
    """Where the values of a head's keys from `part` on are, and bytes between 16 dimensions and the
    next ones."""
    keys, num_keys, begin = layout
    values = keys + (kv_heads + head) * num_keys * dim * BFLOAT
    return values + (part - begin) // PAIR * LANES * UNIT, num_keys // PAIR * LANES * UNIT


@njit
def _clear(target, count):
    x = halves_of(target, count)
    for i in range(count):
        x[i] = 0


@njit
def _place_key(key, target, dim):
    """Each pair of its dimensions into a row of its own."""
    x, y = words_of(key, dim // PAIR), words_of(target, dim // PAIR * LANES)
    for i in range(dim // PAIR):
        y[i * LANES] = x[i]


@njit
def _pair_values(first, second, target, stride, dim):
    """Values of two keys as pairs; `stride` bytes between 16 dimensions and the next ones."""
    x, y = halves_of(first, dim), halves_of(second, dim)
    for tile in range(dim // LANES):
        z = words_of(target + tile * stride, LANES)
        for i in range(LANES):
            low, high = np.int32(x[tile * LANES + i]), np.int32(y[tile * LANES + i])
            z[i] = np.int32(low & 0xFFFF) | np.int32(high << 16)


@njit
def begin(source, queries, row, spare, dim):
    """Write the query of a row, scaled and rounded."""
    scale(source, spare, dim)
    for i in range(0, dim, STEP):
        round_32(spare + i * FLOAT, queries + (row * dim + i) * BFLOAT)


@njit
def _score(queries, num_rows, layout, head, part, part_end, scores, dim):
    """scores[row, key - part] of the rows, for the keys in whole tiles."""
    keys, num_keys, begin = layout
    own_keys = keys + (head * num_keys + part - begin) * dim * BFLOAT
    for first in range(0, part_end - part, COLUMNS):
        tile = own_keys + first * dim * BFLOAT
        for row in range(0, num_rows, ROWS):
            _product(
                queries + row * dim * BFLOAT, dim * BFLOAT, tile, LANES * UNIT,
                LANES * dim * BFLOAT, dim // PAIR,
                scores + (row * PARTITION + first) * FLOAT, PARTITION * FLOAT, 0,
            )  # fmt: skip


@njit(error_model="numpy")
def _add_values(geometry, num_rows, layout, head, part, part_end, scores, weights, sums, dim):
    """sums[row] += weights[row, key - part] values[key]"""
    values, of_dims = values_of(layout, geometry[3], head, part, dim)
    pairs = -(-(part_end - part) // PAIR)
    for i in range(0, dim, COLUMNS):
        tile = values + i // LANES * of_dims
        for row in range(0, num_rows, ROWS):
            _product(
                weights + row * PARTITION * BFLOAT, PARTITION * BFLOAT, tile, LANES * UNIT, of_dims,
                pairs, sums + (row * dim + i) * FLOAT, dim * FLOAT, 1,
            )  # fmt: skip
