"""Rounds inputs of the packed product to 16 bits, with one scale for 32 of them, in
LLVM's terms."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.packed_tile import FLOAT, ORDER, WORD
from diptych_kernels.native.compiled.vectors import (
    FLOAT32,
    FLOATS,
    INT16,
    INT32,
    INTS,
    LANES,
    everywhere,
    function,
    load,
    store,
)
from diptych_kernels.native.tile_layout import QUAD

LEVELS = 32767.0
"""The largest level of a rounded input; the smallest is its negative."""


@intrinsic
def round_group(context, source, target, factors):
    """Round 32 float32 numbers to int16 levels, each quad in the order in which products read it.
    Their scale, their scaled sum and those of their halves follow, which are NaN if a number is NaN
    or infinite."""

    def generate(context, builder, signature, arguments):
        source, target, factors = arguments
        halves = [load(builder, source, FLOATS, half * LANES * FLOAT) for half in range(2)]
        largest = _largest(builder, halves)
        is_zero = builder.fcmp_ordered("==", largest, FLOAT32(0.0))
        inverse = builder.select(is_zero, FLOAT32(0.0), builder.fdiv(FLOAT32(LEVELS), largest))
        levels = [_rounded(builder, half, everywhere(builder, inverse)) for half in halves]
        for index, level in enumerate(levels):
            words = builder.trunc(_in_order(builder, level), ir.VectorType(INT16, LANES))
            store(builder, words, target, index * LANES * WORD)
        scale = builder.fmul(largest, FLOAT32(1 / LEVELS))
        scale = builder.fadd(scale, _nothing(builder, halves))
        add_up = function(builder, "llvm.vector.reduce.add.v16i32", ir.FunctionType(INT32, [INTS]))
        sums = [builder.call(add_up, [half]) for half in levels]
        store(builder, scale, factors)
        for place, total in enumerate((builder.add(*sums), *sums), 1):
            scaled = builder.fmul(scale, builder.sitofp(total, FLOAT32))
            store(builder, scaled, factors, place * FLOAT)
        return context.get_dummy_value()

    return types.void(source, target, factors), generate


def _largest(builder, halves):
    """The largest absolute value; NaN may hide here."""
    absolute = function(builder, "llvm.fabs.v16f32", ir.FunctionType(FLOATS, [FLOATS]))
    larger = function(builder, "llvm.maxnum.v16f32", ir.FunctionType(FLOATS, [FLOATS] * 2))
    both = builder.call(larger, [builder.call(absolute, [half]) for half in halves], ("nnan",))
    reduce = function(builder, "llvm.vector.reduce.fmax.v16f32", ir.FunctionType(FLOAT32, [FLOATS]))
    return builder.call(reduce, [both], fastmath=("nnan",))


def _rounded(builder, values, inverse):
    """To the nearest level, the even one between two, as int32. Of NaN, to any."""
    nearest = function(builder, "llvm.rint.v16f32", ir.FunctionType(FLOATS, [FLOATS]))
    scaled = builder.call(nearest, [builder.fmul(values, inverse)])
    convert = function(builder, "llvm.fptosi.sat.v16i32.v16f32", ir.FunctionType(INTS, [FLOATS]))
    return builder.call(convert, [scaled])


def _in_order(builder, levels):
    places = [quad + index for quad in range(0, LANES, QUAD) for index in ORDER]
    return builder.shuffle_vector(levels, levels, ir.Constant(INTS, [INT32(n) for n in places]))


def _nothing(builder, halves):
    """Zero, or NaN if there is a NaN or an infinity."""
    zeros = [builder.fmul(half, ir.Constant(FLOATS, [FLOAT32(0.0)] * LANES)) for half in halves]
    add_up = function(
        builder, "llvm.vector.reduce.fadd.v16f32", ir.FunctionType(FLOAT32, [FLOAT32, FLOATS])
    )
    return builder.call(add_up, [FLOAT32(0.0), builder.fadd(*zeros)], fastmath=("reassoc",))
