"""The inner loop of the packed product, in LLVM's terms: Numba has no vectors of integers.

A vector has a lane for each of 16 columns of the result, and in each lane a quad: four of the
values that are summed over, which processors multiply and add in one instruction.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
QUADS = 8
"""Of a group of 32 values."""
FLOAT, QUAD, HALF = 4, 4, 2
"""Bytes."""

_INT8, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 32, 64))
_FLOAT = ir.FloatType()
_LEVELS = ir.VectorType(_INT8, QUAD * LANES)
_PRODUCTS = ir.VectorType(_INT32, QUAD * LANES)
_INTS = ir.VectorType(_INT32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_FLOATS = ir.VectorType(_FLOAT, LANES)


def group_bytes(bits):
    """Of one group of a tile: levels, scales, offsets."""
    return LANES * (QUADS * QUAD * bits // 8 + 2 * HALF)


def tile_product(num_rows, bits):
    """A function that computes the rows from `row` to `row + num_rows` of a tile.

    tile: levels of `bits` bits and their factors, group after group. inputs: [rows, 32 groups]
    int8. factors: [rows, groups, 2] float32, an input group's scale and its scaled sum.
    out: [rows, 16] float32, `stride` bytes from row to row; added to if `add`.
    """

    @intrinsic
    def product(context, tile, groups, inputs, factors, out, stride, add, row):
        def generate(context, builder, signature, arguments):
            tile, groups, inputs, factors, out, stride, add, row = arguments
            rows = [builder.add(row, _INT64(index)) for index in range(num_rows)]
            sums = _sum_groups(builder, bits, tile, groups, inputs, factors, rows)
            _put(builder, sums, out, stride, add, rows)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return product


def _sum_groups(builder, bits, tile, groups, inputs, factors, rows):
    """A loop over groups; returns the sums of each row."""
    before = builder.block
    loop, end = builder.append_basic_block("groups"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    group = builder.phi(_INT64)
    sums = [builder.phi(_FLOATS) for _ in rows]
    weights = _at(builder, tile, group, group_bytes(bits))
    places = [builder.add(builder.mul(row, groups), group) for row in rows]  # of inputs' groups
    added = _add_group(builder, bits, weights, inputs, factors, places, sums)
    following = builder.add(group, _INT64(1))
    for phi, after in zip([group, *sums], [following, *added], strict=True):
        phi.add_incoming(ir.Constant(phi.type, None if phi.type is _FLOATS else 0), before)
        phi.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, end)
    builder.position_at_end(end)
    return added


def _add_group(builder, bits, weights, inputs, factors, places, sums):
    """Quads outside, rows inside: sums of different rows do not wait for each other."""
    dots = [ir.Constant(_INTS, None)] * len(sums)
    for index, levels in enumerate(_levels(builder, weights, bits)):
        for row, place in enumerate(places):
            quad = _load(builder, _at(builder, inputs, place, QUADS * QUAD), _INT32, index * QUAD)
            dots[row] = _add_dots(builder, dots[row], levels, _everywhere(builder, quad))
    first = group_bytes(bits) - 2 * LANES * HALF
    scales, offsets = (
        builder.fpext(_load(builder, weights, _HALVES, first + index * LANES * HALF), _FLOATS)
        for index in range(2)
    )
    added = []
    for dot, place, total in zip(dots, places, sums, strict=True):
        factor = _at(builder, factors, place, 2 * FLOAT)
        scale = _everywhere(builder, _load(builder, factor, _FLOAT, 0))
        scaled_sum = _everywhere(builder, _load(builder, factor, _FLOAT, FLOAT))
        scaled = builder.fmul(builder.sitofp(dot, _FLOATS), scale)
        total = _multiply_add(builder, scaled, scales, total)
        added.append(_multiply_add(builder, scaled_sum, offsets, total))
    return added


def _levels(builder, weights, bits):
    """A group's quads; of 4 bits, two share their bytes."""
    count = QUADS * bits // 8
    loaded = [_load(builder, weights, _LEVELS, index * QUAD * LANES) for index in range(count)]
    if bits == 8:
        return loaded
    low, four = (ir.Constant(_LEVELS, [_INT8(number)] * _LEVELS.count) for number in (15, 4))
    low_halves = [builder.and_(levels, low) for levels in loaded]
    return low_halves + [builder.lshr(levels, four) for levels in loaded]


def _add_dots(builder, sums, levels, inputs):
    """Add the product of two quads, of unsigned and of signed bytes, in each lane."""
    if llvm.get_host_cpu_features().get("avx512vnni"):
        kind = ir.FunctionType(_INTS, [_INTS] * 3)
        function = _function(builder, "llvm.x86.avx512.vpdpbusd.512", kind)
        return builder.call(function, [sums, builder.bitcast(levels, _INTS), inputs])
    inputs = builder.bitcast(inputs, _LEVELS)
    products = builder.mul(builder.zext(levels, _PRODUCTS), builder.sext(inputs, _PRODUCTS))
    for first in range(QUAD):
        lanes = [_INT32(QUAD * lane + first) for lane in range(LANES)]
        own = builder.shuffle_vector(products, products, ir.Constant(_INTS, lanes))
        sums = builder.add(sums, own)
    return sums


def _put(builder, sums, out, stride, add, rows):
    targets = [builder.add(out, builder.mul(row, stride)) for row in rows]
    with builder.if_else(builder.icmp_signed("!=", add, _INT64(0))) as (adds, replaces):
        with adds:
            for total, target in zip(sums, targets, strict=True):
                own = _load(builder, target, _FLOATS, 0)
                _store(builder, builder.fadd(own, total), target)
        with replaces:
            for total, target in zip(sums, targets, strict=True):
                _store(builder, total, target)


def _multiply_add(builder, x, y, z):
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(_function(builder, "llvm.fmuladd.v16f32", kind), [x, y, z])


def _everywhere(builder, value):
    """A number in every lane."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT32(0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, None))


def _at(builder, address, index, num_bytes):
    """The address of something in an array of things of so many bytes."""
    return builder.add(address, builder.mul(index, _INT64(num_bytes)))


def _load(builder, address, kind, offset):
    pointer = builder.inttoptr(builder.add(address, _INT64(offset)), kind.as_pointer())
    return builder.load(pointer, align=1)


def _store(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _function(builder, name, kind):
    known = builder.module.globals
    return known[name] if name in known else ir.Function(builder.module, kind, name)
