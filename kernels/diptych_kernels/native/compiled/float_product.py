"""The product with a matrix of small floats for CPUs, as Numba compiles it; `packed_product.cpu`
calls it. Every stride is in bytes.

Both factors are float32 in the product, so that nothing is rounded but its sums. A vector has a
lane for each of 16 columns of the result. Each row has two sums in each lane, one for even and one
for odd columns of the matrix, which do not wait for each other.
"""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from diptych_kernels.native.arguments import PackedProduct, record_of
from diptych_kernels.native.compiled.packed_tile import FLOATS, HALVES, INTS, WIDTH
from diptych_kernels.native.compiled.primitives import num_threads, thread_index
from diptych_kernels.native.compiled.vectors import (
    FLOAT32,
    INT16,
    INT32,
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
from diptych_kernels.native.tile_layout import BF16, E4M3, GROUP, float_bytes, float_group_bytes

ARGUMENTS = record_of(PackedProduct)
FLOAT = 4
"""Size in bytes."""
MOST_ROWS = 8 if WIDTH == LANES else 4
"""Rows that are computed together, as many as there are registers for."""
SHORTS, BYTES = ir.VectorType(INT16, WIDTH), ir.VectorType(ir.IntType(8), WIDTH)
SIGN, REST, SHIFT = 0x80, 0x7F, 7
"""What makes a float16 of an 8-bit float (e4m3), but for a power of two: its sign 8 bits further
up, and all else 7 bits."""


def entry(kind):
    """Return the kernel for a matrix of floats of a kind."""
    most, four, two, one = (_tile_product(kind, rows) for rows in (MOST_ROWS, 4, 2, 1))
    of_group = float_group_bytes(kind)

    @njit(error_model="numpy")
    def multiply(given):
        """What each thread does: some tiles, for all rows."""
        rows, groups, num_tiles = given.rows, given.groups, given.num_tiles
        x, x_stride, stride, add = given.x, given.x_stride, given.out_stride, given.add
        thread, threads = thread_index(), num_threads()
        for index in range(num_tiles * thread // threads, num_tiles * (thread + 1) // threads):
            tile = given.tiles + index * groups * of_group
            target = given.out + index * LANES * FLOAT
            row = 0
            while row + MOST_ROWS <= rows:
                most(tile, groups, x, x_stride, target, stride, add, row)
                row += MOST_ROWS
            if row + 4 <= rows:
                four(tile, groups, x, x_stride, target, stride, add, row)
                row += 4
            if row + 2 <= rows:
                two(tile, groups, x, x_stride, target, stride, add, row)
                row += 2
            if row < rows:
                one(tile, groups, x, x_stride, target, stride, add, row)

    def float_product(address):
        multiply(carray(address, 1, ARGUMENTS)[0])

    return float_product


def _tile_product(kind, num_rows):
    """Return a function that computes the rows from `row` to `row + num_rows` of a tile."""

    @intrinsic
    def product(context, tile, groups, x, x_stride, out, stride, add, row):
        def generate(context, builder, signature, arguments):
            tile, groups, x, x_stride, out, stride, add, row = arguments
            rows = [builder.add(row, INT64(index)) for index in range(num_rows)]
            inputs = [at(builder, x, own, x_stride) for own in rows]
            targets = [at(builder, out, own, stride) for own in rows]
            for lane in range(0, LANES, WIDTH):
                sums = _sums(builder, kind, tile, lane, groups, inputs)
                for total, target in zip(sums, targets, strict=True):
                    _put(builder, total, builder.add(target, INT64(lane * FLOAT)), add)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return product


def _sums(builder, kind, tile, lane, groups, inputs):
    """A loop over groups; returns the sum of each row."""
    count = len(inputs)

    def add_group(group, values):
        source = at(builder, tile, group, float_group_bytes(kind))
        first = [at(builder, own, group, GROUP * FLOAT) for own in inputs]
        own = [zeros(FLOATS)] * 2 * count if kind == E4M3 else list(values)
        for column in range(GROUP):
            place = (column * LANES + lane) * float_bytes(kind)
            weights = _weights(builder, kind, source, place)
            for row in range(count):
                number = load(builder, first[row], FLOAT32, column * FLOAT)
                factor = everywhere(builder, number, WIDTH)
                index = column % 2 * count + row
                own[index] = multiply_add(builder, weights, factor, own[index])
        if kind != E4M3:
            return own
        scales = load(builder, source, FLOATS, GROUP * LANES + lane * FLOAT)
        return [
            multiply_add(builder, builder.fadd(own[row], own[count + row]), scales, values[row])
            for row in range(count)
        ]

    both = 1 if kind == E4M3 else 2
    sums = repeat(builder, groups, [zeros(FLOATS)] * both * count, add_group)
    if kind == E4M3:
        return sums
    return [builder.fadd(sums[row], sums[count + row]) for row in range(count)]


def _weights(builder, kind, source, place):
    """A column of the matrix, in float32; of 8-bit floats without what the scale contains."""
    if kind == BF16:
        bits = builder.zext(load(builder, source, SHORTS, place), INTS)
        shift = ir.Constant(INTS, [INT32(16)] * WIDTH)
        return builder.bitcast(builder.shl(bits, shift), FLOATS)
    if kind != E4M3:
        return builder.fpext(load(builder, source, HALVES, place), FLOATS)
    bits = builder.zext(load(builder, source, BYTES, place), SHORTS)
    sign = builder.shl(builder.and_(bits, _short(SIGN)), _short(8))
    rest = builder.shl(builder.and_(bits, _short(REST)), _short(SHIFT))
    return builder.fpext(builder.bitcast(builder.or_(sign, rest), HALVES), FLOATS)


def _short(number):
    return ir.Constant(SHORTS, [INT16(number)] * WIDTH)


def _put(builder, total, target, add):
    with builder.if_else(builder.icmp_signed("!=", add, INT64(0))) as (adds, replaces):
        with adds:
            own = load(builder, target, FLOATS)
            store(builder, builder.fadd(own, total), target)
        with replaces:
            store(builder, total, target)
