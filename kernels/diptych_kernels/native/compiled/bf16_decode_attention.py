"""Attention of decodes in bfloat16, for processors that multiply pairs of such numbers.

It works like `decode_attention`, but rounds queries and weights too.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from diptych_kernels.native.compiled.bf16_tile import (
    BFLOAT,
    PAIR,
    PAIRS_TOGETHER,
    STEP,
    add_pairs_32,
    pair_32,
    score_16,
)
from diptych_kernels.native.compiled.decode_attention import FLOAT, INT, LOG2_E, attention
from diptych_kernels.native.compiled.primitives import bfloat, floats, halves_of, ints, prefetch
from diptych_kernels.native.compiled.vectors import LANES, round_32
from diptych_kernels.native.decode_batch import PARTITION

KEYS_TOGETHER = PAIR * PAIRS_TOGETHER


def entry(head_dim):
    """Return the kernel for heads of one size, a multiple of 32; 0: for any of these sizes."""
    return attention(head_dim, _score, _add_values)


@njit
def _score(query, geometry, table, keys, scores, spare, dim):
    """scores[head, key - first] = query[head] . key / sqrt(dim) log2(e)."""
    kv_heads, sharing = geometry[3:5]
    places = ints(spare, PARTITION)
    count = _find(geometry, table, keys[0], keys[1], places, dim)
    rounded = spare + PARTITION * INT
    _round_queries(query, rounded, kv_heads * sharing * dim, dim)
    to_values = geometry[2] * kv_heads * dim * BFLOAT
    for key in range(0, count, LANES):
        for index in range(key, min(key + LANES, count)):  # the values, needed next
            prefetch(places[index] + to_values, kv_heads * dim * BFLOAT)
        for head in range(kv_heads * sharing):
            of_head = rounded + head * dim * BFLOAT
            target = scores + (head * PARTITION + key) * FLOAT
            offset = head // sharing * dim * BFLOAT
            score_16(of_head, spare + key * INT, offset, dim // STEP, target)


@njit(error_model="numpy")
def _find(geometry, table, first, end, places, dim):
    """Where keys are; returns how many. All places behind the last have its place, too."""
    cache, block_stride, block_size, kv_heads, _, _ = geometry
    token = kv_heads * dim * BFLOAT
    key = first
    place = cache
    while key < end:
        offset = key % block_size
        place = cache + table[key // block_size] * block_stride + offset * token
        for _ in range(min(end - key, block_size - offset)):
            places[key - first] = place
            place += token
            key += 1
    for index in range(end - first, PARTITION):
        places[index] = places[end - first - 1]
    return end - first


@njit
def _round_queries(source, target, count, dim):
    x, y = floats(source, count), halves_of(target, count)
    scale = np.float32(LOG2_E / math.sqrt(dim))
    for i in range(count):
        y[i] = bfloat(x[i] * scale)


@njit
def _add_values(geometry, table, keys, weights, spare, partial, dim):
    """partial[head] = weights[head, key - first] value of the key."""
    _, _, block_size, kv_heads, sharing, _ = geometry
    first, end, length = keys
    count = end - first
    places = ints(spare, PARTITION)
    to_values = block_size * kv_heads * dim * BFLOAT
    pairs = spare + PARTITION * INT + kv_heads * sharing * dim * BFLOAT
    rounded = pairs + PARTITION * dim * BFLOAT
    rounds = -(-count // KEYS_TOGETHER)
    for kv_head in range(kv_heads):
        offset = to_values + kv_head * dim * BFLOAT
        for pair in range(rounds * PAIRS_TOGETHER):
            one, other = places[PAIR * pair] + offset, places[PAIR * pair + 1] + offset
            for i in range(0, dim, STEP):
                target = pairs + (pair * dim + i) * PAIR * BFLOAT
                pair_32(one + i * BFLOAT, other + i * BFLOAT, target)
        for head in range(kv_head * sharing, (kv_head + 1) * sharing):
            _round_weights(weights + head * PARTITION * FLOAT, rounded)
            sums = partial + head * (dim + 2) * FLOAT
            for i in range(0, dim, STEP):
                add_pairs_32(
                    rounded, pairs + i * PAIR * BFLOAT, dim * PAIR * BFLOAT, rounds,
                    sums + i * FLOAT,
                )  # fmt: skip
    if end < length:  # the keys that are likely to be next
        following = _find(geometry, table, end, min(end + PARTITION, length), places, dim)
        for index in range(following):
            prefetch(places[index], kv_heads * dim * BFLOAT)


@njit
def _round_weights(weights, target):
    for key in range(0, PARTITION, STEP):
        round_32(weights + key * FLOAT, target + key * BFLOAT)
