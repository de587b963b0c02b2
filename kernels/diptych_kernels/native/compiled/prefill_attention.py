"""Attention of a chunk of a prompt for CPUs, as Numba compiles it.

`paged_attention.cpu` describes it and calls it. Every stride is in bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from diptych_kernels.native.arguments import ChunkAttention, record_of
from diptych_kernels.native.compiled.attention_tile import (
    FLOAT,
    ROWS,
    WIDTH,
    score_tile,
    value_tile,
)
from diptych_kernels.native.compiled.cache_rows import read_floats
from diptych_kernels.native.compiled.decode_attention import (
    LOG2_E,
    LOWEST,
    ONE,
    ZERO,
    cap,
    sink_of,
)
from diptych_kernels.native.compiled.primitives import (
    FAST,
    await_others,
    exp2,
    float_of,
    floats,
    ints,
    num_threads,
    thread_index,
)
from diptych_kernels.native.compiled.vectors import largest_of_64
from diptych_kernels.native.prefill_chunk import PARTITION, ROWS_TOGETHER

KEYS_TOGETHER = 16
"""Keys that are transposed together (the lanes of a vector), or whose values are added together."""
ARGUMENTS = record_of(ChunkAttention)


def entry(head_dim):
    """Return the kernel for one size of heads."""
    return attention(head_dim, _prepare, _begin, _score, _add_values, _nothing, _nothing_more)


def attention(dim, prepare, begin_row, score, add_values, begin_thread, end_thread):
    """Return the kernel, made of functions that know how keys, queries and weights lie in memory.

    A row is a query. The rows of one key-value head are numbered token after token.
    """

    @njit(error_model="numpy")
    def prefill(given):
        """What each thread does: prepares some keys, then attends from some of the rows."""
        tokens, heads, kv_heads = given.tokens, given.heads, given.kv_heads
        length, window, begin, num_keys = given.length, given.window, given.begin, given.num_keys
        thread, threads = thread_index(), num_threads()
        sharing = heads // kv_heads
        blocks = ints(given.blocks, -(-length // given.block_size))
        geometry = (
            given.cache, given.block_stride, given.block_size, kv_heads, blocks, given.item,
        )  # fmt: skip
        layout = given.keys, num_keys, begin
        own_queries = given.scratch + thread * given.scratch_bytes
        sums = own_queries + ROWS_TOGETHER * dim * FLOAT
        scores = sums + ROWS_TOGETHER * dim * FLOAT
        spare = scores + ROWS_TOGETHER * PARTITION * FLOAT
        states = spare + ROWS_TOGETHER * max(PARTITION, dim) * FLOAT
        parts = num_keys // PARTITION * kv_heads
        for index in range(parts * thread // threads, parts * (thread + 1) // threads):
            part = begin + index // kv_heads * PARTITION
            prepare(geometry, layout, index % kv_heads, part, length, spare, dim)
        await_others()
        begin_thread(states + 2 * ROWS_TOGETHER * FLOAT)
        units = -(-tokens * sharing // ROWS_TOGETHER) * kv_heads
        for unit in range(thread, units, threads):
            head, first_row = unit % kv_heads, unit // kv_heads * ROWS_TOGETHER
            num_rows = min(ROWS_TOGETHER, tokens * sharing - first_row)
            for row in range(ROWS_TOGETHER):
                token, place = (first_row + row) // sharing, (first_row + row) % sharing
                source = given.queries + token * given.query_stride
                source += (head * sharing + place) * dim * FLOAT
                begin_row(source if row < num_rows else 0, own_queries, row, dim)
                sink = sink_of(given.sinks, head * sharing + place)
                _begin_sums(sums + row * dim * FLOAT, states + 2 * row * FLOAT, sink, dim)
            before = length - tokens
            first = before + first_row // sharing
            last = before + (first_row + num_rows - 1) // sharing
            part = max(first - window + 1, 0) // PARTITION * PARTITION
            while part <= last:
                part_end = min(part + PARTITION, last + 1)
                score(own_queries, layout, head, part, part_end, scores, dim)
                for row in range(num_rows):
                    if given.softcap:
                        cap(scores + row * PARTITION * FLOAT, float_of(given.softcap))
                    position = before + (first_row + row) // sharing
                    low = min(max(part, position - window + 1), part_end) - part
                    high = max(min(part_end, position + 1) - part, low)
                    _weigh(
                        scores + row * PARTITION * FLOAT, low, high,
                        states + 2 * row * FLOAT, sums + row * dim * FLOAT, dim,
                    )  # fmt: skip
                add_values(geometry, layout, head, part, part_end, scores, spare, sums, dim)
                part += PARTITION
            for row in range(num_rows):
                token, place = (first_row + row) // sharing, (first_row + row) % sharing
                target = given.attended + (token * heads + head * sharing + place) * dim * FLOAT
                _finish(sums + row * dim * FLOAT, states + 2 * row * FLOAT, target, dim)
        end_thread()

    def prefill_attention(address):
        prefill(carray(address, 1, ARGUMENTS)[0])

    return prefill_attention


@njit
def _nothing(memory):
    """Threads need no preparation."""


@njit
def _nothing_more():
    """...and leave nothing."""


@njit
def place_of(geometry, head, key, dim):
    """Return where in the cache a key of a head is; its values are `block_size`
    tokens behind it."""
    cache, block_stride, block_size, kv_heads, table, item = geometry
    token = (key % block_size * kv_heads + head) * dim * item
    return cache + table[key // block_size] * block_stride + token


@njit(error_model="numpy")
def _prepare(geometry, layout, head, part, length, spare, dim):
    """Keys of a head as [keys / 16, dim, 16]; places behind the last hold zeros."""
    keys, num_keys, begin = layout
    item = geometry[5]
    for first in range(part, part + PARTITION, KEYS_TOGETHER):
        y = floats(keys + (head * num_keys + first - begin) * dim * FLOAT, KEYS_TOGETHER * dim)
        for lane in range(KEYS_TOGETHER):
            if first + lane < length:
                read_floats(place_of(geometry, head, first + lane, dim), spare, dim, item)
                x = floats(spare, dim)
                for i in range(dim):
                    y[i * KEYS_TOGETHER + lane] = x[i]
            else:
                for i in range(dim):
                    y[i * KEYS_TOGETHER + lane] = ZERO


@njit(error_model="numpy", fastmath=FAST)
def _begin(source, queries, row, dim):
    """A row's query, scaled so that powers of two of its scores are the weights; 0: no row."""
    y = floats(queries + row * dim * FLOAT, dim)
    scale = np.float32(LOG2_E / math.sqrt(dim))
    if source == 0:
        for i in range(dim):
            y[i] = ZERO
    else:
        x = floats(source, dim)
        for i in range(dim):
            y[i] = x[i] * scale


@njit
def _begin_sums(sums, state, sink, dim):
    """What a row has seen before its first key: a sink, if there is one."""
    x, largest_and_total = floats(sums, dim), floats(state, 2)
    for i in range(dim):
        x[i] = ZERO
    largest_and_total[0], largest_and_total[1] = sink, ZERO if sink == LOWEST else ONE


@njit
def _score(queries, layout, head, part, part_end, scores, dim):
    """scores[row, key - part] of all rows, for the keys in whole tiles."""
    keys, num_keys, begin = layout
    own_keys = keys + (head * num_keys + part - begin) * dim * FLOAT
    for first in range(0, part_end - part, KEYS_TOGETHER):
        for row in range(0, ROWS_TOGETHER, ROWS):
            score_tile(
                queries + row * dim * FLOAT, dim * FLOAT, own_keys + first * dim * FLOAT, dim,
                scores + (row * PARTITION + first) * FLOAT, PARTITION * FLOAT,
            )  # fmt: skip


@njit(fastmath=FAST)
def _weigh(scores, low, high, state, sums, dim):
    """Turn a row's scores into weights, which are 0 but from `low` to `high`, and scale what was
    summed up so far to the new maximum. Loops over all keys, so that vectors have no rest."""
    x, y, z = floats(scores, PARTITION), floats(sums, dim), floats(state, 2)
    if low > 0 or high < PARTITION:
        _hide(scores, low, high)
    largest = max(z[0], largest_of_64(scores))  # NaN may hide here; its weight shows it
    scale = exp2(z[0] - largest)
    total = z[1] * scale
    for i in range(PARTITION):
        x[i] = ZERO if x[i] == LOWEST else exp2(x[i] - largest)
        total += x[i]
    z[0], z[1] = largest, total
    for i in range(dim):
        y[i] *= scale


@njit
def _hide(scores, low, high):
    x = floats(scores, PARTITION)
    for i in range(PARTITION):
        x[i] = x[i] if low <= i < high else LOWEST


@njit(error_model="numpy")
def _add_values(geometry, layout, head, part, part_end, scores, spare, sums, dim):
    """sums[row] += scores[row, key - part] values[key], some keys of a block at a time."""
    _, _, block_size, kv_heads, _, item = geometry
    token = kv_heads * dim * item
    key = part
    while key < part_end:
        count = min(part_end - key, block_size - key % block_size, KEYS_TOGETHER)
        place = place_of(geometry, head, key, dim) + block_size * token
        for index in range(count):
            read_floats(place + index * token, spare + index * dim * FLOAT, dim, item)
        for row in range(0, ROWS_TOGETHER, ROWS):
            weight = scores + (row * PARTITION + key - part) * FLOAT
            for i in range(0, dim, WIDTH):
                value_tile(
                    weight, PARTITION * FLOAT, spare + i * FLOAT, dim * FLOAT, count,
                    sums + (row * dim + i) * FLOAT, dim * FLOAT,
                )  # fmt: skip
        key += count


@njit(error_model="numpy", fastmath=FAST)
def _finish(sums, state, target, dim):
    x, y = floats(sums, dim), floats(target, dim)
    scale = ONE / floats(state, 2)[1]
    for i in range(dim):
        y[i] = x[i] * scale
