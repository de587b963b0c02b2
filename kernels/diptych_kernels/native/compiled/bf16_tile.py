"""The inner loops of decode attention in bfloat16: instructions that multiply pairs and add them
to a float32 sum."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.vectors import (
    FLOATS,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    at,
    everywhere,
    function,
    load,
    repeat,
    store,
    sums_across,
    zeros,
)

PAIR = 2
STEP = PAIR * LANES
"""Numbers that are multiplied by one instruction."""
BFLOAT, FLOAT, ADDRESS = 2, 4, 8
"""Sizes in bytes."""
PAIRS_TOGETHER = 4
"""Pairs of keys whose sums do not wait for each other."""
HALVES = ir.VectorType(INT16, STEP)


def add_products(builder, x, y, total):
    """total[lane] + x[pair] . y[pair], of each lane's pair."""
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    dot = function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind)
    return builder.call(dot, [total, x, y])


@intrinsic
def score_16(context, query, places, offset, steps, scores):
    """scores[key] = query . key at `places[key] + offset`

    query and keys: [32 steps] bfloat16. places: [16] int64. scores: [16] float32.
    """

    def generate(context, builder, signature, arguments):
        query, places, offset, steps, scores = arguments

        def add_dimensions(index, sums):
            here = at(builder, offset, index, STEP * BFLOAT)
            of_query = load(builder, at(builder, query, index, STEP * BFLOAT), INTS)
            added = []
            for key, total in enumerate(sums):
                place = load(builder, places, INT64, key * ADDRESS)
                of_key = load(builder, builder.add(place, here), INTS)
                added.append(add_products(builder, of_query, of_key, total))
            return added

        sums = repeat(builder, steps, [zeros(FLOATS)] * LANES, add_dimensions)
        store(builder, sums_across(builder, sums), scores)
        return context.get_dummy_value()

    return types.void(query, places, offset, steps, scores), generate


@intrinsic
def pair_32(context, first, second, target):
    """Interleave 32 dimensions of two values as pairs, in the order of `_order`."""

    def generate(context, builder, signature, arguments):
        first, second, target = arguments
        one, other = (load(builder, source, HALVES) for source in (first, second))
        for half in range(2):
            lanes = [of + place for place in _order(half) for of in (0, STEP)]
            store(builder, _shuffle(builder, one, other, lanes), target, half * STEP * BFLOAT)
        return context.get_dummy_value()

    return types.void(first, second, target), generate


def _order(half):
    """Which dimensions the 16 pairs of a half are of: an instruction interleaves two vectors
    within parts of 128 bits."""
    return [8 * part + 4 * half + place for part in range(4) for place in range(4)]


def _shuffle(builder, first, second, lanes):
    kind = ir.VectorType(INT32, len(lanes))
    return builder.shuffle_vector(first, second, ir.Constant(kind, [INT32(x) for x in lanes]))


@intrinsic
def add_pairs_32(context, weights, pairs, stride, count, sums):
    """sums[dimension] = weights[key] values[key, dimension], summed over `4 count` pairs of keys

    weights: [8 count] bfloat16. pairs: as `pair_32` leaves them, `stride` bytes from one to the
    next. sums: [32] float32.
    """

    def generate(context, builder, signature, arguments):
        weights, pairs, stride, count, sums = arguments

        def add_some(index, totals):
            added = []
            for number in range(PAIRS_TOGETHER):
                pair = builder.add(builder.mul(index, INT64(PAIRS_TOGETHER)), INT64(number))
                weight = load(builder, at(builder, weights, pair, PAIR * BFLOAT), INT32)
                place = at(builder, pairs, pair, stride)
                for half in range(2):
                    values = load(builder, place, INTS, half * STEP * BFLOAT)
                    total = totals[2 * number + half]
                    added.append(add_products(builder, values, everywhere(builder, weight), total))
            return added

        totals = repeat(builder, count, [zeros(FLOATS)] * 2 * PAIRS_TOGETHER, add_some)
        while len(totals) > 2:
            rest = len(totals) // 2
            totals = [builder.fadd(x, y) for x, y in zip(totals[:rest], totals[rest:], strict=True)]
        one, other = totals
        order = _order(0) + _order(1)
        places = [order.index(dimension) for dimension in range(STEP)]
        for half in range(2):
            own = places[half * LANES : (half + 1) * LANES]
            store(builder, _shuffle(builder, one, other, own), sums, half * LANES * FLOAT)
        return context.get_dummy_value()

    return types.void(weights, pairs, stride, count, sums), generate
