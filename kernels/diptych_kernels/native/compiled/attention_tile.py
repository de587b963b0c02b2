"""The inner loops of prefill attention: 8 queries by 16 keys, and 8 queries by 32 dimensions."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.vectors import (
    FLOAT32,
    FLOATS,
    INT64,
    LANES,
    at,
    everywhere,
    load,
    multiply_add,
    repeat,
    store,
    zeros,
)

ROWS = 8
"""Queries that are computed together."""
WIDTH = 2 * LANES
"""Dimensions of values that are computed together."""
FLOAT = 4
"""Size in bytes."""


@intrinsic
def score_tile(context, queries, query_stride, keys, dim, scores, score_stride):
    """scores[row, key] = queries[row] . keys[key]

    queries: [8, dim] float32, `query_stride` bytes from row to row.
    keys: [dim, 16] float32, contiguous. scores: [8, 16] float32.
    """

    def generate(context, builder, signature, arguments):
        queries, query_stride, keys, dim, scores, score_stride = arguments
        rows = [at(builder, queries, INT64(row), query_stride) for row in range(ROWS)]

        def add_dimension(index, sums):
            of_keys = load(builder, at(builder, keys, index, LANES * FLOAT), FLOATS)
            return [
                multiply_add(
                    builder,
                    everywhere(builder, load(builder, at(builder, row, index, FLOAT), FLOAT32)),
                    of_keys,
                    total,
                )
                for row, total in zip(rows, sums, strict=True)
            ]

        sums = repeat(builder, dim, [zeros(FLOATS)] * ROWS, add_dimension)
        for row, total in enumerate(sums):
            store(builder, total, at(builder, scores, INT64(row), score_stride))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), generate


@intrinsic
def value_tile(context, weights, weight_stride, values, value_stride, count, sums, sum_stride):
    """sums[row] += weights[row, key] values[key], for `count` keys.

    weights: [8, count] float32. values: [count, 32] float32. sums: [8, 32] float32. Each with so
    many bytes from row to row.
    """

    def generate(context, builder, signature, arguments):
        weights, weight_stride, values, value_stride, count, sums, sum_stride = arguments
        of_weights, of_sums = (
            [at(builder, first, INT64(row), stride) for row in range(ROWS)]
            for first, stride in ((weights, weight_stride), (sums, sum_stride))
        )
        parts = range(0, WIDTH * FLOAT, LANES * FLOAT)

        def add_key(index, totals):
            key = at(builder, values, index, value_stride)
            of_key = [load(builder, key, FLOATS, part) for part in parts]
            added = []
            for row, weight in enumerate(of_weights):
                weight = load(builder, at(builder, weight, index, FLOAT), FLOAT32)
                weight = everywhere(builder, weight)
                own = totals[row * len(parts) : (row + 1) * len(parts)]
                added += [
                    multiply_add(builder, weight, value, total)
                    for value, total in zip(of_key, own, strict=True)
                ]
            return added

        places = [(row, part) for row in of_sums for part in parts]
        totals = [load(builder, row, FLOATS, part) for row, part in places]
        totals = repeat(builder, count, totals, add_key)
        for (row, part), total in zip(places, totals, strict=True):
            store(builder, total, row, part)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), generate
