"""The attention kernel for CPUs, as Numba compiles it.

`paged_attention.cpu` describes it and calls it.

Every length is in elements, every stride in bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from diptych_kernels.native.arguments import DecodeAttention, record_of
from diptych_kernels.native.compiled.cache_rows import read_floats
from diptych_kernels.native.compiled.primitives import (
    FAST,
    await_others,
    exp2,
    float_of,
    floats,
    ints,
    num_threads,
    prefetch,
    thread_index,
)
from diptych_kernels.native.compiled.vectors import largest_of_64
from diptych_kernels.native.decode_batch import PARTITION

FLOAT, INT = 4, 8
"""Sizes in bytes."""
STEP = 4
"""Keys that are computed together."""
ARGUMENTS = record_of(DecodeAttention)
LOG2_E = math.log2(math.e)
ZERO, ONE, LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-1e30)
"""LOWEST is less than any score, and finite: a difference of two of them is 0."""


def entry(head_dim):
    """Return the kernel for one size of heads, whose loops over it are unrolled; 0:
    for any size."""
    return attention(head_dim, _score, _add_values)


def attention(head_dim, score, add_values):
    """Return the kernel, made of functions that read keys and values."""

    @njit(error_model="numpy")
    def decode(given, dim):
        """What each thread does."""
        num_decodes, heads, kv_heads = given.num_decodes, given.heads, given.kv_heads
        lengths, first_keys = ints(given.lengths, num_decodes), ints(given.first_keys, num_decodes)
        table_width, partitions = given.table_width, ints(given.partitions, num_decodes + 1)
        partials = given.partials
        thread, threads = thread_index(), num_threads()
        scores = given.scratch + thread * given.scratch_bytes
        spare = scores + heads * PARTITION * FLOAT
        geometry = (
            given.cache, given.block_stride, given.block_size, kv_heads, heads // kv_heads,
            given.item,
        )  # fmt: skip
        partial_size = heads * (dim + 2) * FLOAT
        num_partitions = partitions[num_decodes]
        sequence = 0
        for index in range(
            num_partitions * thread // threads, num_partitions * (thread + 1) // threads
        ):
            while partitions[sequence + 1] <= index:
                sequence += 1
            first = first_keys[sequence] + (index - partitions[sequence]) * PARTITION
            keys = first, min(first + PARTITION, lengths[sequence]), lengths[sequence]
            table = ints(given.tables + sequence * table_width * INT, table_width)
            partial = partials + index * partial_size
            query = given.queries + sequence * given.query_stride
            score(query, geometry, table, keys, scores, spare, dim)
            for head in range(heads):
                mine = partial + head * (dim + 2) * FLOAT
                if given.softcap:
                    cap(scores + head * PARTITION * FLOAT, float_of(given.softcap))
                _weigh(scores + head * PARTITION * FLOAT, keys[1] - first, mine, dim)
            add_values(geometry, table, keys, scores, spare, partial, dim)
        await_others()
        for sequence in range(
            num_decodes * thread // threads, num_decodes * (thread + 1) // threads
        ):
            begin, count = partitions[sequence], partitions[sequence + 1] - partitions[sequence]
            for head in range(heads):
                of_head = partials + begin * partial_size + head * (dim + 2) * FLOAT
                target = given.attended + (sequence * heads + head) * dim * FLOAT
                _merge(of_head, partial_size, count, sink_of(given.sinks, head), target, dim)

    def decode_attention(address):
        given = carray(address, 1, ARGUMENTS)[0]
        decode(given, head_dim or given.head_dim)

    return decode_attention


@njit(error_model="numpy")
def _score(query, geometry, table, keys, scores, spare, dim):
    """scores[head, key - first] = query[head] . key / sqrt(dim) log2(e)."""
    cache, block_stride, block_size, kv_heads, sharing, item = geometry
    first, end, _ = keys
    token = kv_heads * dim * item
    scale = np.float32(LOG2_E / math.sqrt(dim))
    key = first
    while key < end:
        offset = key % block_size
        row = cache + table[key // block_size] * block_stride + offset * token
        last = min(end, key + block_size - offset)
        while key < last:
            step = STEP if key + STEP <= last else 1
            prefetch(row + block_size * token, step * token)  # the values, needed next
            head = 0
            for kv_head in range(kv_heads):
                place = row + kv_head * dim * item
                of_head, stride = _floats_at(place, token, step, item, spare, dim)
                for _ in range(sharing):
                    target = scores + (head * PARTITION + key - first) * FLOAT
                    if step == STEP:
                        _dot4(query + head * dim * FLOAT, of_head, stride, scale, target, dim)
                    else:
                        _dot(query + head * dim * FLOAT, of_head, scale, target, dim)
                    head += 1
            row += step * token
            key += step


@njit
def _floats_at(place, stride, count, item, spare, dim):
    """Where some keys or values of a head are float32 numbers, and how far from each other: they
    are so in the cache, or are written down once for all heads that share them."""
    if item == FLOAT:
        return place, stride
    for index in range(count):
        read_floats(place + index * stride, spare + index * dim * FLOAT, dim, item)
    return spare, dim * FLOAT


@njit(fastmath=FAST)
def _dot(query, key, scale, score, dim):
    """score[0] = scale query . key"""
    x, y = floats(query, dim), floats(key, dim)
    total = np.float32(0.0)
    for i in range(dim):
        total += x[i] * y[i]
    floats(score, 1)[0] = total * scale


@njit(fastmath=FAST)
def _dot4(query, keys, stride, scale, scores, dim):
    """As `_dot` for `STEP` keys, which share each read of the query."""
    x = floats(query, dim)
    y0, y1 = floats(keys, dim), floats(keys + stride, dim)
    y2, y3 = floats(keys + 2 * stride, dim), floats(keys + 3 * stride, dim)
    total0 = total1 = total2 = total3 = np.float32(0.0)
    for i in range(dim):
        total0 += x[i] * y0[i]
        total1 += x[i] * y1[i]
        total2 += x[i] * y2[i]
        total3 += x[i] * y3[i]
    target = floats(scores, STEP)
    target[0], target[1] = total0 * scale, total1 * scale
    target[2], target[3] = total2 * scale, total3 * scale


@njit(fastmath=FAST)
def _weigh(scores, count, partial, dim):
    """Turn the scores of a head into weights; begin its partial: no values, maximum, sum.
    Loops over all keys of a partition, so that vectors have no rest; those behind the last weigh 0.
    """
    x, y = floats(scores, PARTITION), floats(partial, dim + 2)
    for i in range(count, PARTITION):
        x[i] = LOWEST
    largest = largest_of_64(scores)  # NaN may hide here; its weight shows it
    total = ZERO
    for i in range(PARTITION):
        x[i] = ZERO if x[i] == LOWEST else exp2(x[i] - largest)
        total += x[i]
    for i in range(dim):
        y[i] = ZERO
    y[dim], y[dim + 1] = largest, total


@njit(error_model="numpy")
def _add_values(geometry, table, keys, weights, spare, partial, dim):
    """partial[head] += weights[head, key - first] value of the key."""
    cache, block_stride, block_size, kv_heads, sharing, item = geometry
    first, end, length = keys
    token = kv_heads * dim * item
    key = first
    while key < end:
        offset = key % block_size
        row = cache + table[key // block_size] * block_stride + (block_size + offset) * token
        last = min(end, key + block_size - offset)
        while key < last:
            step = STEP if key + STEP <= last else 1
            later = key + PARTITION
            if later < length:  # the keys that are likely to be next
                block = cache + table[later // block_size] * block_stride
                prefetch(block + later % block_size * token, step * token)
            head = 0
            for kv_head in range(kv_heads):
                place = row + kv_head * dim * item
                values, stride = _floats_at(place, token, step, item, spare, dim)
                for _ in range(sharing):
                    weight = weights + (head * PARTITION + key - first) * FLOAT
                    target = partial + head * (dim + 2) * FLOAT
                    if step == STEP:
                        _add4(weight, values, stride, target, dim)
                    else:
                        _add(floats(weight, 1)[0], values, target, dim)
                    head += 1
            row += step * token
            key += step


@njit(fastmath=FAST)
def _add(weight, values, target, dim):
    """target += weight values"""
    x, y = floats(values, dim), floats(target, dim)
    for i in range(dim):
        y[i] += weight * x[i]


@njit(fastmath=FAST)
def _add4(weights, values, stride, target, dim):
    """As `_add` for the values of `STEP` keys."""
    weight = floats(weights, STEP)
    weight0, weight1, weight2, weight3 = weight[0], weight[1], weight[2], weight[3]
    x0, x1 = floats(values, dim), floats(values + stride, dim)
    x2, x3 = floats(values + 2 * stride, dim), floats(values + 3 * stride, dim)
    y = floats(target, dim)
    for i in range(dim):
        y[i] += (weight0 * x0[i] + weight1 * x1[i]) + (weight2 * x2[i] + weight3 * x3[i])


@njit(error_model="numpy", fastmath=FAST)
def cap(scores, softcap):
    """Bend the scores of a partition: softcap tanh(score / softcap), in units of log2(e)."""
    x, bound = floats(scores, PARTITION), softcap * np.float32(LOG2_E)
    scale = np.float32(-2.0) / softcap
    for i in range(PARTITION):
        rest = exp2(abs(x[i]) * scale)
        bent = bound * (ONE - rest) / (ONE + rest)
        x[i] = -bent if x[i] < ZERO else bent


@njit
def sink_of(sinks, head):
    """Return the score of a head's sink, as the other scores are scaled; LOWEST: it has none."""
    return floats(sinks, head + 1)[head] * np.float32(LOG2_E) if sinks else LOWEST


@njit(error_model="numpy", fastmath=FAST)
def _merge(partials, stride, count, sink, target, dim):
    """The attention of one head from its partials, and from a sink, which has no value."""
    largest = max(sink, floats(partials, dim + 2)[dim])
    for index in range(count):
        largest = max(largest, floats(partials + index * stride, dim + 2)[dim])
    total = ZERO if sink == LOWEST else exp2(sink - largest)
    y = floats(target, dim)
    for i in range(dim):
        y[i] = np.float32(0.0)
    for index in range(count):
        partial = floats(partials + index * stride, dim + 2)
        share = exp2(partial[dim] - largest)
        total += share * partial[dim + 1]
        _add(share, partials + index * stride, target, dim)
    for i in range(dim):
        y[i] /= total
