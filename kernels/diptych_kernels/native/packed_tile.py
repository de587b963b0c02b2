"""The inner loop of the packed product, in LLVM's terms: Numba has no vectors of integers.

A vector has a lane for each of 16 columns of the result, and in each lane a quad: four of the
values that are summed over, which processors multiply and add in one instruction.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.vectors import (
    FLOAT32,
    FLOATS,
    INT32,
    INT64,
    INTS,
    LANES,
    at,
    everywhere,
    function,
    load,
    multiply_add,
    repeat,
    store,
    target_has,
    zeros,
)

QUADS = 8
"""Of a group of 32 values."""
PARTS = 2
"""Of a group of inputs, each with a scale of its own: one large value spoils fewer others."""
FLOAT, QUAD, HALF = 4, 4, 2
"""Bytes."""
GROUP_BYTES, FACTOR_BYTES = QUADS * QUAD, (PARTS + 1) * FLOAT
"""Of a group of one row's inputs."""

INT8 = ir.IntType(8)
LEVELS = ir.VectorType(INT8, QUAD * LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)


def group_bytes(bits):
    """Of one group of a tile: levels, scales, offsets."""
    return LANES * (QUADS * QUAD * bits // 8 + 2 * HALF)


def tile_product(num_rows, bits):
    """A function that computes the rows from `row` to `row + num_rows` of a tile.

    tile: levels of `bits` bits and their factors, group after group. inputs: of these rows, behind
    those of the rows before, [groups, num_rows, 32] int8: all are near one address. factors:
    alike [groups, num_rows, PARTS + 1] float32: scales of a group's parts, its scaled sum.
    out: [rows, 16] float32, `stride` bytes from row to row; added to if `add`.
    """

    @intrinsic
    def product(context, tile, groups, inputs, factors, out, stride, add, row):
        def generate(context, builder, signature, arguments):
            tile, groups, inputs, factors, out, stride, add, row = arguments
            before = builder.mul(row, groups)  # groups of other rows
            inputs = at(builder, inputs, before, GROUP_BYTES)
            factors = at(builder, factors, before, FACTOR_BYTES)
            sums = _sum_groups(builder, bits, tile, groups, inputs, factors, num_rows)
            rows = [builder.add(row, INT64(index)) for index in range(num_rows)]
            _put(builder, sums, out, stride, add, rows)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return product


def _sum_groups(builder, bits, tile, groups, inputs, factors, num_rows):
    """A loop over groups; returns the sums of each row."""

    def add_group(group, sums):
        weights = at(builder, tile, group, group_bytes(bits))
        own_inputs = at(builder, inputs, group, num_rows * GROUP_BYTES)
        own_factors = at(builder, factors, group, num_rows * FACTOR_BYTES)
        return _add_group(builder, bits, weights, own_inputs, own_factors, sums)

    return repeat(builder, groups, [zeros(FLOATS)] * num_rows, add_group)


def _add_group(builder, bits, weights, inputs, factors, sums):
    """Quads outside, rows inside: sums of different rows do not wait for each other."""
    levels = _levels(builder, weights, bits)
    scaled = [zeros(FLOATS)] * len(sums)
    for part in range(PARTS):
        dots = [zeros(INTS)] * len(sums)
        for index in range(part * QUADS // PARTS, (part + 1) * QUADS // PARTS):
            for row in range(len(sums)):
                quad = load(builder, inputs, INT32, row * GROUP_BYTES + index * QUAD)
                quad = everywhere(builder, quad)
                dots[row] = _add_dots(builder, dots[row], levels[index], quad, bits)
        for row in range(len(sums)):
            scale = load(builder, factors, FLOAT32, row * FACTOR_BYTES + part * FLOAT)
            dot = builder.sitofp(dots[row], FLOATS)
            scaled[row] = multiply_add(builder, dot, everywhere(builder, scale), scaled[row])
    first = group_bytes(bits) - 2 * LANES * HALF
    scales, offsets = (
        builder.fpext(load(builder, weights, HALVES, first + index * LANES * HALF), FLOATS)
        for index in range(2)
    )
    added = []
    for row, (product, total) in enumerate(zip(scaled, sums, strict=True)):
        scaled_sum = load(builder, factors, FLOAT32, row * FACTOR_BYTES + PARTS * FLOAT)
        total = multiply_add(builder, product, scales, total)
        added.append(multiply_add(builder, everywhere(builder, scaled_sum), offsets, total))
    return added


def _levels(builder, weights, bits):
    """A group's quads; of 4 bits, two share their bytes."""
    count = QUADS * bits // 8
    loaded = [load(builder, weights, LEVELS, index * QUAD * LANES) for index in range(count)]
    if bits == 8:
        return loaded
    low, high = zip(*[_halves(builder, levels) for levels in loaded], strict=True)
    return low + high


def _halves(builder, levels):
    """The low and the high four bits of each byte."""
    mask, four = (ir.Constant(LEVELS, [INT8(number)] * LEVELS.count) for number in (15, 4))
    return builder.and_(levels, mask), builder.lshr(levels, four)


def _add_dots(builder, sums, levels, inputs, bits):
    """Add the product of two quads, of unsigned and of signed bytes, in each lane."""
    if target_has("avx512vnni"):
        kind = ir.FunctionType(INTS, [INTS] * 3)
        add_dots = function(builder, "llvm.x86.avx512.vpdpbusd.512", kind)
        return builder.call(add_dots, [sums, builder.bitcast(levels, INTS), inputs])
    inputs = builder.bitcast(inputs, LEVELS)
    if bits == 4:
        return builder.add(sums, _dots_of_halves(builder, levels, inputs))
    # Pairs of products of 8-bit levels do not fit 16 bits.
    low, high = _halves(builder, levels)
    high_dots = _dots_of_halves(builder, high, inputs)
    sums = builder.add(sums, builder.shl(high_dots, ir.Constant(INTS, [INT32(4)] * LANES)))
    return builder.add(sums, _dots_of_halves(builder, low, inputs))


def _dots_of_halves(builder, levels, inputs):
    """Products of levels below 16, by AVX2's instructions for vectors of half the size."""
    bytes_, pairs, quads = (
        ir.VectorType(ir.IntType(bits), 2 * LANES * 8 // bits) for bits in (8, 16, 32)
    )
    add_pairs = function(
        builder, "llvm.x86.avx2.pmadd.ub.sw", ir.FunctionType(pairs, [bytes_, bytes_])
    )
    add_quads = function(builder, "llvm.x86.avx2.pmadd.wd", ir.FunctionType(quads, [pairs, pairs]))
    ones = ir.Constant(pairs, [pairs.element(1)] * pairs.count)
    halves = []
    for first in (0, bytes_.count):
        places = [INT32(first + index) for index in range(bytes_.count)]
        own = ir.Constant(ir.VectorType(INT32, bytes_.count), places)
        both = [builder.shuffle_vector(x, x, own) for x in (levels, inputs)]
        halves.append(builder.call(add_quads, [builder.call(add_pairs, both), ones]))
    lanes = ir.Constant(INTS, [INT32(lane) for lane in range(LANES)])
    return builder.shuffle_vector(*halves, lanes)


def _put(builder, sums, out, stride, add, rows):
    targets = [at(builder, out, row, stride) for row in rows]
    with builder.if_else(builder.icmp_signed("!=", add, INT64(0))) as (adds, replaces):
        with adds:
            for total, target in zip(sums, targets, strict=True):
                own = load(builder, target, FLOATS)
                store(builder, builder.fadd(own, total), target)
        with replaces:
            for total, target in zip(sums, targets, strict=True):
                store(builder, total, target)
