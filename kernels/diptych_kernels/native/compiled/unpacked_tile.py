"""Unpacks a packed tile's values to bfloat16, in the form for the matrix unit, in LLVM's terms."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.vectors import (
    FLOATS,
    INT64,
    INTS,
    LANES,
    at,
    constant,
    load,
    multiply_add,
    repeat,
    store,
)
from diptych_kernels.native.tile_layout import HALF, QUAD, QUADS, group_bytes

VECTOR = 64
"""Size, in bytes, of a vector."""
HALVES = ir.VectorType(ir.HalfType(), LANES)
GROUP_BYTES = 2 * QUADS * VECTOR
"""Size, in bytes, of an unpacked group: 32 values in each of 16 columns, in bfloat16."""
QUAD_BYTES = GROUP_BYTES // QUADS
PLACE, BYTE = 15, 8
"""Bits: the position in a lane at which a byte of levels is processed, and its size. The position
is as high as a mantissa allows: the lower it is, the larger is the power that is added to a level
and subtracted again, and the more of the value that rounds off."""
MANTISSA = 23
"""Bits of a float32's mantissa. A level in the mantissa of a power of two, below its leading bit,
is added to the power."""
LARGER = 1 + math.log(2) / 256
"""Factors are multiplied by this, so that truncating numbers to their upper halves keeps their
mean, as rounding does: truncation takes 1 / 256 of a power of two, ln 2 / 256 of a number, on
average."""


def unpack_tile(bits):
    """Return a function that writes [16 groups, 16] pairs of bfloat16: row r of a group of 32 has
    its values 2 r and 2 r + 1 of each of 16 columns.

    tile: as in `packed_tile.tile_product`.
    """

    @intrinsic
    def unpack(context, tile, groups, target):
        def generate(context, builder, signature, arguments):
            tile, groups, target = arguments

            def unpack_some(index, values):
                unpack_half(builder, bits, tile, index, target)
                return values

            repeat(builder, builder.mul(groups, INT64(2)), [], unpack_some)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 3), generate

    return unpack


def unpack_half(builder, bits, tile, index, target):
    """Write half a group of a tile; `index` counts halves."""
    group, half = builder.lshr(index, INT64(1)), builder.and_(index, INT64(1))
    source = at(builder, tile, group, group_bytes(bits))
    scales, offsets = _factors(builder, bits, source)
    count = QUADS * bits // 8
    levels_at = at(builder, source, half, count // 2 * VECTOR)
    target = at(builder, target, group, GROUP_BYTES)
    target = at(builder, target, half, count // 2 * QUAD_BYTES)
    for number in range(count // 2):
        levels = load(builder, levels_at, INTS, number * VECTOR)
        of_bytes = [_at_place(builder, levels, byte) for byte in range(QUAD)]
        for part in range(8 // bits):
            values = [
                _value(builder, moved, part * bits, bits, scales, offsets[part])
                for moved in of_bytes
            ]
            for pair in range(QUAD // 2):
                both = _pair(builder, *values[2 * pair : 2 * pair + 2])
                place = (number + part * count) * QUAD_BYTES + pair * VECTOR
                store(builder, both, target, place)


def _factors(builder, bits, source):
    """Scales; and offsets that take away the power of a level in each part of a byte."""
    first = group_bytes(bits) - 2 * LANES * HALF
    larger = _everywhere(LARGER)
    scales, offsets = (
        builder.fmul(
            builder.fpext(load(builder, source, HALVES, first + index * LANES * HALF), FLOATS),
            larger,
        )
        for index in range(2)
    )
    return scales, [
        multiply_add(builder, _everywhere(-_power(bit)), scales, offsets)
        for bit in range(0, BYTE, bits)
    ]


def _at_place(builder, levels, byte):
    """A byte of each lane at `PLACE`, among others."""
    bits = constant(abs(PLACE - BYTE * byte))
    return (builder.shl if BYTE * byte < PLACE else builder.lshr)(levels, bits)


def _value(builder, moved, bit, bits, scales, offsets):
    """level * scale + offset, of the levels that begin at a bit of the byte at `PLACE`."""
    level = builder.and_(moved, constant(((1 << bits) - 1) << (PLACE + bit)))
    level = builder.or_(level, builder.bitcast(_everywhere(_power(bit)), INTS))
    return multiply_add(builder, builder.bitcast(level, FLOATS), scales, offsets)


def _pair(builder, low, high):
    """The upper halves of two numbers in each lane."""
    low, high = (builder.bitcast(value, INTS) for value in (low, high))
    high = builder.and_(high, constant(-0x10000))
    return builder.or_(high, builder.lshr(low, constant(16)))


def _power(bit):
    """A float32 in which the bit of the byte at `PLACE` counts one."""
    return float(1 << (MANTISSA - PLACE - bit))


def _everywhere(number):
    return ir.Constant(FLOATS, [ir.FloatType()(number)] * LANES)
