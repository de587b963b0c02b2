"""Attention of a prompt's chunk for CPUs, as Numba compiles it.

`paged_attention.cpu` says what it does, and calls it. Every stride is in bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from diptych_kernels.native.attention_tile import FLOAT, ROWS, WIDTH, score_tile, value_tile
from diptych_kernels.native.prefill_chunk import (
    KEYS_TOGETHER,
    NUM_NUMBERS,
    PARTITION,
    ROWS_TOGETHER,
)
from diptych_kernels.native.primitives import (
    FAST,
    await_others,
    exp2,
    floats,
    ints,
    num_threads,
    thread_index,
)

LOG2_E = math.log2(math.e)
ZERO, LOWEST = np.float32(0.0), np.float32(-1e30)
"""The second is less than any score, and finite: a difference of two of them is 0."""


def entry(head_dim):
    """The kernel for one size of heads."""

    def prefill_attention(numbers):
        _prefill(carray(numbers, NUM_NUMBERS), head_dim)

    return prefill_attention


@njit(error_model="numpy")
def _prefill(numbers, dim):
    """What each thread does: transposes some keys, then attends from some of the rows.

    A row is a query; those of one key-value head are numbered token after token.
    """
    queries, query_stride, cache, block_stride, attended, tokens, heads, kv_heads = numbers[:8]
    block_size, table, length, window, begin, keys, scratch = numbers[8:NUM_NUMBERS]
    thread, threads = thread_index(), num_threads()
    sharing = heads // kv_heads
    geometry = cache, block_stride, block_size, kv_heads, ints(table, -(-length // block_size))
    tiles = -(-(length - begin) // KEYS_TOGETHER)
    tile_size = KEYS_TOGETHER * dim * FLOAT
    for index in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        for head in range(kv_heads):
            target = keys + (head * tiles + index) * tile_size
            _transpose(geometry, head, begin + index * KEYS_TOGETHER, length, target, dim)
    await_others()
    own_queries = scratch + thread * ROWS_TOGETHER * (2 * dim + PARTITION + 2) * FLOAT
    sums = own_queries + ROWS_TOGETHER * dim * FLOAT
    scores = sums + ROWS_TOGETHER * dim * FLOAT
    states = scores + ROWS_TOGETHER * PARTITION * FLOAT
    units = -(-tokens * sharing // ROWS_TOGETHER) * kv_heads
    for unit in range(thread, units, threads):
        head, first_row = unit % kv_heads, unit // kv_heads * ROWS_TOGETHER
        num_rows = min(ROWS_TOGETHER, tokens * sharing - first_row)
        first_query, last_query = first_row // sharing, (first_row + num_rows - 1) // sharing
        for row in range(ROWS_TOGETHER):
            token, place = (first_row + row) // sharing, (first_row + row) % sharing
            source = queries + token * query_stride + (head * sharing + place) * dim * FLOAT
            own = row * dim * FLOAT
            _begin(
                source, own_queries + own, sums + own, states + 2 * row * FLOAT, row < num_rows, dim
            )
        before = length - tokens
        end = before + last_query + 1
        part = max(before + first_query - window + 1, 0) // PARTITION * PARTITION
        while part < end:
            part_end = min(part + PARTITION, end)
            own_keys = keys + (head * tiles + (part - begin) // KEYS_TOGETHER) * tile_size
            _score(own_queries, own_keys, part_end - part, scores, dim)
            for row in range(num_rows):
                position = before + (first_row + row) // sharing
                low = min(max(part, position - window + 1), part_end) - part
                high = max(min(part_end, position + 1) - part, low)
                _weigh(
                    scores + row * PARTITION * FLOAT, low, high, part_end - part,
                    states + 2 * row * FLOAT, sums + row * dim * FLOAT, dim,
                )  # fmt: skip
            _add_values(geometry, head, part, part_end, scores, sums, dim)
            part += PARTITION
        for row in range(num_rows):
            token, place = (first_row + row) // sharing, (first_row + row) % sharing
            target = attended + (token * heads + head * sharing + place) * dim * FLOAT
            _finish(sums + row * dim * FLOAT, states + 2 * row * FLOAT, target, dim)


@njit(error_model="numpy")
def _transpose(geometry, head, first, length, target, dim):
    """Some keys of a head as [dim, 16]; places behind the last hold zeros."""
    cache, block_stride, block_size, kv_heads, table = geometry
    y = floats(target, KEYS_TOGETHER * dim)
    for lane in range(KEYS_TOGETHER):
        key = first + lane
        if key < length:
            place = (key % block_size * kv_heads + head) * dim * FLOAT
            x = floats(cache + table[key // block_size] * block_stride + place, dim)
            for i in range(dim):
                y[i * KEYS_TOGETHER + lane] = x[i]
        else:
            for i in range(dim):
                y[i * KEYS_TOGETHER + lane] = ZERO


@njit(error_model="numpy", fastmath=FAST)
def _begin(source, query, sums, state, is_row, dim):
    """A row's query, scaled so that powers of two of its scores are the weights; nothing seen."""
    y, z = floats(query, dim), floats(sums, dim)
    scale = np.float32(LOG2_E / math.sqrt(dim))
    for i in range(dim):
        z[i] = ZERO
    if is_row:
        x = floats(source, dim)
        for i in range(dim):
            y[i] = x[i] * scale
    else:
        for i in range(dim):
            y[i] = ZERO
    largest_and_total = floats(state, 2)
    largest_and_total[0], largest_and_total[1] = LOWEST, ZERO


@njit
def _score(queries, keys, count, scores, dim):
    """scores[row, key] of all rows, for the keys in whole tiles."""
    for first in range(0, count, KEYS_TOGETHER):
        for row in range(0, ROWS_TOGETHER, ROWS):
            score_tile(
                queries + row * dim * FLOAT, dim * FLOAT, keys + first * dim * FLOAT, dim,
                scores + (row * PARTITION + first) * FLOAT, PARTITION * FLOAT,
            )  # fmt: skip


@njit(fastmath=FAST)
def _weigh(scores, low, high, count, state, sums, dim):
    """Turn a row's scores into weights, which are 0 but from `low` to `high`, and scale what was
    summed up so far to the new maximum."""
    _clear(scores, low)
    _clear(scores + high * FLOAT, count - high)
    x, y, z = floats(scores + low * FLOAT, high - low), floats(sums, dim), floats(state, 2)
    largest = max(z[0], _largest(scores + low * FLOAT, high - low))
    scale = exp2(z[0] - largest)
    total = z[1] * scale
    for i in range(high - low):
        x[i] = exp2(x[i] - largest)
        total += x[i]
    z[0], z[1] = largest, total
    for i in range(dim):
        y[i] *= scale


@njit(fastmath=FAST | {"nnan"})
def _largest(scores, count):
    """NaN among the scores may hide here; their weights show it."""
    x, largest = floats(scores, count), LOWEST
    for i in range(count):
        largest = max(largest, x[i])
    return largest


@njit
def _clear(weights, count):
    x = floats(weights, count)
    for i in range(count):
        x[i] = ZERO


@njit(error_model="numpy")
def _add_values(geometry, head, part, part_end, weights, sums, dim):
    """sums[row] += weights[row, key - part] values[key], block after block."""
    cache, block_stride, block_size, kv_heads, table = geometry
    token = kv_heads * dim * FLOAT
    key = part
    while key < part_end:
        offset = key % block_size
        count = min(part_end - key, block_size - offset)
        values = cache + table[key // block_size] * block_stride
        values += (block_size + offset) * token + head * dim * FLOAT
        for row in range(0, ROWS_TOGETHER, ROWS):
            weight = weights + (row * PARTITION + key - part) * FLOAT
            for i in range(0, dim, WIDTH):
                value_tile(
                    weight, PARTITION * FLOAT, values + i * FLOAT, token, count,
                    sums + (row * dim + i) * FLOAT, dim * FLOAT,
                )  # fmt: skip
        key += count


@njit(error_model="numpy", fastmath=FAST)
def _finish(sums, state, target, dim):
    x, y = floats(sums, dim), floats(target, dim)
    scale = np.float32(1.0) / floats(state, 2)[1]
    for i in range(dim):
        y[i] = x[i] * scale
