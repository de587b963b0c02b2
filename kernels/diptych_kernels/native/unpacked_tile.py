"""A packed tile's values in bfloat16, as the matrix unit takes them, in LLVM's terms."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.packed_tile import HALF, HALVES, QUAD, QUADS, group_bytes
from diptych_kernels.native.vectors import (
    FLOATS,
    INTS,
    LANES,
    at,
    constant,
    load,
    multiply_add,
    repeat,
    store,
)

VECTOR = 64
"""Bytes."""
GROUP_BYTES = 2 * QUADS * VECTOR
"""Of a group of 16 columns in bfloat16."""
POWER, PLACE = 256.0, 15
"""A float32 of 256 has its ones at this bit: a level put there makes the sum of both."""


def unpack_tile(bits):
    """A function that writes [16 groups, 16] pairs of bfloat16: row r of a group of 32 has its
    values 2 r and 2 r + 1 of each of 16 columns.

    tile: as `packed_tile.tile_product` takes it.
    """

    @intrinsic
    def unpack(context, tile, groups, target):
        def generate(context, builder, signature, arguments):
            tile, groups, target = arguments

            def unpack_group(index, values):
                source = at(builder, tile, index, group_bytes(bits))
                _unpack_group(builder, bits, source, at(builder, target, index, GROUP_BYTES))
                return values

            repeat(builder, groups, [], unpack_group)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 3), generate

    return unpack


def _unpack_group(builder, bits, source, target):
    scales, offsets = _factors(builder, bits, source)
    count = QUADS * bits // 8
    for index in range(count):
        levels = load(builder, source, INTS, index * VECTOR)
        for half in range(8 // bits):
            quad = index + half * count
            values = [
                _value(builder, levels, 8 * byte + half * bits, bits, scales, offsets)
                for byte in range(QUAD)
            ]
            for pair in range(QUAD // 2):
                both = _pair(builder, *values[2 * pair : 2 * pair + 2])
                store(builder, both, target, (quad * QUAD // 2 + pair) * VECTOR)


def _factors(builder, bits, source):
    """Scales, and offsets that take the power away again."""
    first = group_bytes(bits) - 2 * LANES * HALF
    scales, offsets = (
        builder.fpext(load(builder, source, HALVES, first + index * LANES * HALF), FLOATS)
        for index in range(2)
    )
    power = ir.Constant(FLOATS, [ir.FloatType()(-POWER)] * LANES)
    return scales, multiply_add(builder, power, scales, offsets)


def _value(builder, levels, bit, bits, scales, offsets):
    """level * scale + offset, of the levels that begin at a bit of each lane."""
    shift = builder.shl if bit < PLACE else builder.lshr
    level = shift(levels, constant(abs(PLACE - bit)))
    level = builder.and_(level, constant(((1 << bits) - 1) << PLACE))
    level = builder.or_(level, builder.bitcast(_power(), INTS))
    return multiply_add(builder, builder.bitcast(level, FLOATS), scales, offsets)


def _pair(builder, low, high):
    """Two numbers in each lane, rounded to the upper halves of their bits."""
    low, high = (
        builder.add(builder.bitcast(value, INTS), constant(0x8000)) for value in (low, high)
    )
    high = builder.and_(high, constant(-0x10000))
    return builder.or_(high, builder.lshr(low, constant(16)))


def _power():
    return ir.Constant(FLOATS, [ir.FloatType()(POWER)] * LANES)
