"""The inner loops of prefill attention: products of some rows with two vectors of columns, and
powers of 64 scores.

A unit is what a lane of a vector multiplies at once: a float32, or a pair of bfloat16. Both have
four bytes.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.bf16_tile import add_products
from diptych_kernels.native.compiled.packed_tile import WIDTH
from diptych_kernels.native.compiled.vectors import (
    FLOAT32,
    FLOATS,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    at,
    constant,
    everywhere,
    load,
    multiply_add,
    repeat,
    rounded_32,
    store,
    zeros,
)

ROWS = 8 if WIDTH == LANES else 6
"""Rows that are computed together."""
COLUMNS = 2 * WIDTH
"""Columns that are computed together: as many sums as there are registers for."""
FLOAT, UNIT = 4, 4
"""Sizes in bytes."""
PARTS = range(0, 4 * LANES * FLOAT, LANES * FLOAT)
"""Where the vectors of 64 scores are."""
EXACT = (1.00000007, 0.69314697, 0.2402212, 0.05550713, 0.00967554, 0.00132765)
"""2^x = 1.00000007 + 0.69314697 x + ... for |x| <= 1/2, wrong by 7.5e-8 at most: as exact as the
sum of such terms can be, if they are chosen for the least error and not at zero."""
FOR_HALVES = (0.99992807, 0.69326099, 0.24261113, 0.05517167)
"""Wrong by 7.5e-5 at most: a bfloat16 is rounded by 2e-3."""
NO_FRACTION = 1.5 * 2**23
"""A float32 so large that its neighbours are whole numbers, which its last bits count."""
EXPONENT = 23
"""Bits of a float32 below its exponent."""
LEAST, LOWEST = -126.0, -1e30
"""The least power of two that is not rounded otherwise; a score that is hidden."""


def row_product(in_pairs):
    """Return a function that computes a tile of a product of float32, or of pairs of bfloat16.

    a: [ROWS, units], `a_stride` bytes from row to row. b: [units, COLUMNS], `b_stride` bytes from
    unit to unit; the second half of the columns is `second` bytes behind the first. out: [ROWS,
    COLUMNS] float32, `stride` bytes from row to row; added to if `add`.
    """

    @intrinsic
    def product(context, a, a_stride, b, b_stride, second, units, out, stride, add):
        def generate(context, builder, signature, arguments):
            a, a_stride, b, b_stride, second, units, out, stride, add = arguments
            kind = ir.VectorType(INT32 if in_pairs else FLOAT32, WIDTH)
            rows = [at(builder, a, INT64(row), a_stride) for row in range(ROWS)]
            targets = [at(builder, out, INT64(row), stride) for row in range(ROWS)]
            places = [(target, part) for target in targets for part in (0, WIDTH * FLOAT)]
            multiply = add_products if in_pairs else multiply_add

            def add_unit(index, sums):
                first = at(builder, b, index, b_stride)
                columns = [load(builder, own, kind) for own in (first, builder.add(first, second))]
                added: list[ir.Value] = []
                for row in rows:
                    factor = load(builder, at(builder, row, index, UNIT), kind.element)
                    factor = everywhere(builder, factor, WIDTH)
                    for column in columns:
                        added.append(multiply(builder, factor, column, sums[len(added)]))
                return added

            nothing = [zeros(ir.VectorType(FLOAT32, WIDTH))] * len(places)
            with_sums = builder.icmp_signed("!=", add, INT64(0))
            before = _loaded_if(builder, with_sums, places, nothing)
            sums = repeat(builder, units, before, add_unit)
            for total, (target, part) in zip(sums, places, strict=True):
                store(builder, total, target, part)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 9), generate

    return product


def _loaded_if(builder, condition, places, otherwise):
    """The vectors at some places, or what they are otherwise."""
    before = builder.block
    with builder.if_then(condition):
        loaded = [load(builder, place, otherwise[0].type, part) for place, part in places]
        inside = builder.block
    found = []
    for own, other in zip(loaded, otherwise, strict=True):
        phi = builder.phi(own.type)
        phi.add_incoming(own, inside)
        phi.add_incoming(other, before)
        found.append(phi)
    return found


@intrinsic
def exceeds(context, scores, largest):
    """Whether one of 64 scores is more than the number at `largest`."""

    def generate(context, builder, signature, arguments):
        scores, largest = arguments
        bound = everywhere(builder, load(builder, largest, FLOAT32))
        first, *others = [
            builder.fcmp_ordered(">", load(builder, scores, FLOATS, part), bound) for part in PARTS
        ]
        for other in others:
            first = builder.or_(first, other)
        return builder.icmp_unsigned("!=", builder.bitcast(first, INT16), INT16(0))

    return types.boolean(scores, largest), generate


def weights_of(terms, to_halves, may_hide):
    """Return a function that makes weights of 64 scores: 2^(score - largest).

    terms: of the power. to_halves: whether weights are written as bfloat16. may_hide: whether
    scores may be LOWEST, which have no weight. totals: [16] float32, which lanes of weights are
    added to.
    """

    @intrinsic
    def weigh(context, scores, largest, totals, target):
        def generate(context, builder, signature, arguments):
            scores, largest, totals, target = arguments
            base = everywhere(builder, load(builder, largest, FLOAT32))
            total, weights = load(builder, totals, FLOATS), []
            for part in PARTS:
                score = load(builder, scores, FLOATS, part)
                weight = _power(builder, builder.fsub(score, base), terms)
                if may_hide:
                    hidden = builder.fcmp_ordered("==", score, _floats(LOWEST))
                    weight = builder.select(hidden, zeros(FLOATS), weight)
                total = builder.fadd(total, weight)
                weights.append(weight)
            store(builder, total, totals)
            if to_halves:
                weights = [
                    rounded_32(builder, *weights[first : first + 2])
                    for first in range(0, len(weights), 2)
                ]
            for weight, part in zip(weights, PARTS, strict=False):
                store(builder, weight, target, part)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 4), generate

    return weigh


def _power(builder, x, terms):
    """2^x for x <= 0; NaN stays NaN."""
    least = _floats(LEAST)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    moved = builder.fadd(x, _floats(NO_FRACTION))
    rest = builder.fsub(x, builder.fsub(moved, _floats(NO_FRACTION)))
    power = _floats(terms[-1])
    for term in reversed(terms[:-1]):
        power = multiply_add(builder, power, rest, _floats(term))
    whole = builder.shl(builder.bitcast(moved, INTS), constant(EXPONENT))
    return builder.bitcast(builder.add(builder.bitcast(power, INTS), whole), FLOATS)


def _floats(number):
    return ir.Constant(FLOATS, [FLOAT32(number)] * LANES)
