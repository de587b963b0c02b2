"""Rounds inputs of the packed product to 16 or 8 bits, with one scale for 32 of them, in LLVM's
terms."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.packed_tile import FLOAT, ORDER, WORD
from diptych_kernels.native.compiled.vectors import (
    FLOAT32,
    FLOATS,
    INT32,
    INTS,
    LANES,
    constant,
    everywhere,
    function,
    load,
    store,
)
from diptych_kernels.native.tile_layout import BYTE, QUAD

NO_FRACTION, NO_FRACTION_BITS = 1.5 * 2**23, 0x4B400000
"""A float32 so large that its neighbours are whole numbers, and its bits."""


def rounder(size):
    """Return a function that rounds 32 float32 numbers to levels of `size` bytes: words, each quad
    in the order in which products read it, or bytes in their own. Their scale, their scaled sum and
    those of their halves follow, which are NaN if a number is NaN or infinite."""
    most = float((1 << size * BYTE - 1) - 1)
    """The largest level; the smallest is its negative."""

    @intrinsic
    def round_group(context, source, target, factors):
        def generate(context, builder, signature, arguments):
            source, target, factors = arguments
            halves = [load(builder, source, FLOATS, half * LANES * FLOAT) for half in range(2)]
            largest = _largest(builder, halves)
            is_zero = builder.fcmp_ordered("==", largest, FLOAT32(0.0))
            inverse = builder.select(is_zero, FLOAT32(0.0), builder.fdiv(FLOAT32(most), largest))
            levels = [_rounded(builder, half, everywhere(builder, inverse)) for half in halves]
            for index, level in enumerate(levels):
                stored = _in_order(builder, level) if size == WORD else level
                stored = builder.trunc(stored, ir.VectorType(ir.IntType(size * BYTE), LANES))
                store(builder, stored, target, index * LANES * size)
            _put_factors(builder, levels, largest, most, factors)
            return context.get_dummy_value()

        return types.void(source, target, factors), generate

    return round_group


def _put_factors(builder, levels, largest, most, factors):
    nothing = builder.fmul(largest, FLOAT32(0.0))  # or NaN, if it is not finite
    scale = builder.fadd(builder.fmul(largest, FLOAT32(1 / most)), nothing)
    add_up = function(builder, "llvm.vector.reduce.add.v16i32", ir.FunctionType(INT32, [INTS]))
    sums = [builder.call(add_up, [half]) for half in levels]
    store(builder, scale, factors)
    for place, total in enumerate((builder.add(*sums), *sums), 1):
        scaled = builder.fmul(scale, builder.sitofp(total, FLOAT32))
        store(builder, scaled, factors, place * FLOAT)


def _largest(builder, halves):
    """The largest absolute value, or a NaN if there is one: without signs, floats are in the order
    of their bits, and NaN comes last."""
    larger = function(builder, "llvm.smax.v16i32", ir.FunctionType(INTS, [INTS] * 2))
    reduce = function(builder, "llvm.vector.reduce.smax.v16i32", ir.FunctionType(INT32, [INTS]))
    absolute = [builder.and_(builder.bitcast(half, INTS), constant(0x7FFFFFFF)) for half in halves]
    both = builder.call(larger, absolute)
    return builder.bitcast(builder.call(reduce, [both]), FLOAT32)


def _rounded(builder, values, inverse):
    """To the nearest level, the even one between two, as int32; of NaN, to any. The sum with
    `NO_FRACTION` is rounded to a whole number, which its last bits count."""
    no_fraction = everywhere(builder, FLOAT32(NO_FRACTION))
    moved = builder.fadd(builder.fmul(values, inverse), no_fraction)
    return builder.sub(builder.bitcast(moved, INTS), constant(NO_FRACTION_BITS))


def _in_order(builder, levels):
    places = [quad + index for quad in range(0, LANES, QUAD) for index in ORDER]
    return builder.shuffle_vector(levels, levels, ir.Constant(INTS, [INT32(n) for n in places]))
