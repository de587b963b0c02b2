"""Attention of a chunk of a prompt for CPUs, as Numba compiles it.

`paged_attention.cpu` describes it and calls it. Every stride is in bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from diptych_kernels.native.arguments import ChunkAttention, record_of
from diptych_kernels.native.compiled.attention_tile import (
    COLUMNS,
    EXACT,
    FLOAT,
    ROWS,
    exceeds,
    row_product,
    weights_of,
)
from diptych_kernels.native.compiled.cache_rows import read_floats
from diptych_kernels.native.compiled.decode_attention import LOG2_E, LOWEST, ONE, ZERO, cap, sink_of
from diptych_kernels.native.compiled.packed_tile import WIDTH
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
from diptych_kernels.native.prefill_chunk import LANES, PARTITION, ROWS_TOGETHER

KEYS_TOGETHER = 16
"""Keys that are transposed together."""
ARGUMENTS = record_of(ChunkAttention)
STATE = (1 + LANES) * FLOAT
"""Size of what is known of a row: its largest score, and sums of weights."""
_product = row_product(in_pairs=False)


def entry(head_dim):
    """Return the kernel for one size of heads."""
    weigh = weighing(EXACT, to_halves=False)
    return attention(head_dim, _prepare, _begin, _score, weigh, _add_values, nothing, nothing_more)


def attention(dim, prepare, begin_row, score, weigh, add_values, begin_thread, end_thread):
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
        states = spare + PARTITION * dim * FLOAT
        parts = num_keys // PARTITION * kv_heads
        for index in range(parts * thread // threads, parts * (thread + 1) // threads):
            part = begin + index // kv_heads * PARTITION
            prepare(geometry, layout, index % kv_heads, part, length, spare, dim)
        await_others()
        begin_thread(states + ROWS_TOGETHER * STATE)
        of_head = -(-tokens * sharing // ROWS_TOGETHER)
        for unit in range(thread, of_head * kv_heads, threads):
            head, first_row = unit // of_head, unit % of_head * ROWS_TOGETHER
            num_rows = min(ROWS_TOGETHER, tokens * sharing - first_row)
            for row in range(num_rows):
                token, place = (first_row + row) // sharing, (first_row + row) % sharing
                source = given.queries + token * given.query_stride
                source += (head * sharing + place) * dim * FLOAT
                begin_row(source, own_queries, row, scores, dim)
                sink = sink_of(given.sinks, head * sharing + place)
                _begin_sums(sums + row * dim * FLOAT, states + row * STATE, sink, dim)
            before = length - tokens
            first = before + first_row // sharing
            last = before + (first_row + num_rows - 1) // sharing
            part = max(first - window + 1, 0) // PARTITION * PARTITION
            while part <= last:
                part_end = min(part + PARTITION, last + 1)
                score(own_queries, num_rows, layout, head, part, part_end, scores, dim)
                for row in range(num_rows):
                    if given.softcap:
                        cap(scores + row * PARTITION * FLOAT, float_of(given.softcap))
                    position = before + (first_row + row) // sharing
                    low = min(max(part, position - window + 1), part_end) - part
                    high = max(min(part_end, position + 1) - part, low)
                    weigh(
                        scores, row, low, high, states + row * STATE, sums + row * dim * FLOAT,
                        spare, dim,
                    )  # fmt: skip
                add_values(
                    geometry, num_rows, layout, head, part, part_end, scores, spare, sums, dim
                )
                part += PARTITION
            for row in range(num_rows):
                token, place = (first_row + row) // sharing, (first_row + row) % sharing
                target = given.attended + (token * heads + head * sharing + place) * dim * FLOAT
                _finish(sums + row * dim * FLOAT, states + row * STATE, target, dim)
        end_thread()

    def prefill_attention(address):
        prefill(carray(address, 1, ARGUMENTS)[0])

    return prefill_attention


@njit
def nothing(memory):
    """Threads need no preparation."""


@njit
def nothing_more():
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


@njit
def _begin(source, queries, row, spare, dim):
    scale(source, queries + row * dim * FLOAT, dim)


@njit(error_model="numpy", fastmath=FAST)
def scale(query, target, dim):
    """Write a query so that powers of two of its scores are the weights."""
    x, y = floats(query, dim), floats(target, dim)
    factor = np.float32(LOG2_E / math.sqrt(dim))
    for i in range(dim):
        y[i] = x[i] * factor


@njit
def _begin_sums(sums, state, sink, dim):
    """What a row has seen before its first key: a sink, if there is one."""
    x, y = floats(sums, dim), floats(state, 1 + LANES)
    for i in range(dim):
        x[i] = ZERO
    for i in range(LANES):
        y[1 + i] = ZERO
    y[0], y[1] = sink, ZERO if sink == LOWEST else ONE


@njit
def _score(queries, num_rows, layout, head, part, part_end, scores, dim):
    """scores[row, key - part] of the rows, for the keys in whole tiles."""
    keys, num_keys, begin = layout
    own_keys = keys + (head * num_keys + part - begin) * dim * FLOAT
    second = WIDTH * FLOAT * (dim if WIDTH == KEYS_TOGETHER else 1)
    for first in range(0, part_end - part, COLUMNS):
        tile = own_keys + first * dim * FLOAT
        for row in range(0, num_rows, ROWS):
            _product(
                queries + row * dim * FLOAT, dim * FLOAT, tile, KEYS_TOGETHER * FLOAT, second, dim,
                scores + (row * PARTITION + first) * FLOAT, PARTITION * FLOAT, 0,
            )  # fmt: skip


def weighing(terms, to_halves):
    """Return a function that turns scores of a row into weights, which are 0 but from `low` to
    `high`. If a score is higher than those before, it scales what was summed up so far.

    terms, to_halves: see `weights_of`. Weights of float32 replace scores, others are written to
    `target`, [rows, 64].
    """
    of_all, of_some = (weights_of(terms, to_halves, may_hide) for may_hide in (False, True))

    @njit
    def weigh(all_scores, row, low, high, state, sums, target, dim):
        scores = all_scores + row * PARTITION * FLOAT
        weights = target + row * PARTITION * FLOAT // 2 if to_halves else scores
        is_whole = low == 0 and high == PARTITION
        if not is_whole:
            _hide(scores, low, high)
        if exceeds(scores, state):
            _raise_largest(scores, state, sums, dim)
        if is_whole:
            of_all(scores, state, state + FLOAT, weights)
        else:
            of_some(scores, state, state + FLOAT, weights)

    return weigh


@njit(fastmath=FAST)
def _raise_largest(scores, state, sums, dim):
    x, y = floats(sums, dim), floats(state, 1 + LANES)
    largest = max(y[0], largest_of_64(scores))  # NaN may hide here; its weight shows it
    factor = exp2(y[0] - largest)
    y[0] = largest
    for i in range(LANES):
        y[1 + i] *= factor
    for i in range(dim):
        x[i] *= factor


@njit
def _hide(scores, low, high):
    x = floats(scores, PARTITION)
    for i in range(PARTITION):
        x[i] = x[i] if low <= i < high else LOWEST


@njit(error_model="numpy")
def _add_values(geometry, num_rows, layout, head, part, part_end, scores, spare, sums, dim):
    """sums[row] += scores[row, key - part] values[key]"""
    _, _, block_size, kv_heads, _, item = geometry
    token = kv_heads * dim * item
    key = part
    while key < part_end:
        count = min(part_end - key, block_size - key % block_size)
        place = place_of(geometry, head, key, dim) + block_size * token
        for index in range(count):
            target = spare + (key - part + index) * dim * FLOAT
            read_floats(place + index * token, target, dim, item)
        key += count
    for i in range(0, dim, COLUMNS):
        for row in range(0, num_rows, ROWS):
            _product(
                scores + row * PARTITION * FLOAT, PARTITION * FLOAT, spare + i * FLOAT, dim * FLOAT,
                WIDTH * FLOAT, part_end - part, sums + (row * dim + i) * FLOAT, dim * FLOAT, 1,
            )  # fmt: skip


@njit(error_model="numpy", fastmath=FAST)
def _finish(sums, state, target, dim):
    x, y, z = floats(sums, dim), floats(target, dim), floats(state, 1 + LANES)
    total = ZERO
    for i in range(LANES):
        total += z[1 + i]
    factor = ONE / total
    for i in range(dim):
        y[i] = x[i] * factor
