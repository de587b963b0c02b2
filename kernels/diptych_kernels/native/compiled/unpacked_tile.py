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
from diptych_kernels.native.tile_layout import (
    BYTE,
    GROUP,
    HALF,
    LOW_BITS,
    QUAD,
    QUADS,
    SPANS,
    factor_bytes,
    group_bytes,
    top_bit,
)

VECTOR = 64
"""Size, in bytes, of a vector."""
HALVES = ir.VectorType(ir.HalfType(), LANES)
GROUP_BYTES = 2 * QUADS * VECTOR
"""Size, in bytes, of an unpacked group: 32 values in each of 16 columns, in bfloat16."""
QUAD_BYTES = GROUP_BYTES // QUADS
PLACE = 15
"""The bit of a lane at which a byte of levels is processed. It is as high as a mantissa allows: the
lower it is, the larger is the power that is added to a level and subtracted again, and the more of
the value that rounds off."""
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
    of_byte = 1 if bits == BYTE else BYTE // LOW_BITS
    count, of_part = QUADS // of_byte, BYTE // of_byte
    firsts = [part * of_part if bits == of_part else 0 for part in range(of_byte)]
    factors = _factors(builder, bits, source, firsts)
    levels_at = at(builder, source, half, count // 2 * VECTOR)
    tops_at = at(builder, source, half, VECTOR)
    target = at(builder, target, group, GROUP_BYTES)
    target = at(builder, target, half, count // 2 * QUAD_BYTES)
    for number in range(count // 2):
        vector = load(builder, levels_at, INTS, number * VECTOR)
        for part, first in enumerate(firsts):
            values = []
            for byte in range(QUAD):
                level = _moved(builder, vector, byte * BYTE + part * of_part, first, of_part)
                if bits > of_part:
                    tops = load(builder, tops_at, INTS, count * VECTOR)
                    from_bit = byte * BYTE + top_bit(number + part * count)
                    top = _moved(builder, tops, from_bit, of_part, bits - of_part)
                    level = builder.or_(level, top)
                values.append(_value(builder, level, first, *factors[part]))
            for pair in range(QUAD // 2):
                both = _pair(builder, *values[2 * pair : 2 * pair + 2])
                place = (number + part * count) * QUAD_BYTES + pair * VECTOR
                store(builder, both, target, place)


def _factors(builder, bits, source, firsts):
    """Return the scales of each part of a byte, and offsets that take away the power of its
    levels, which begin at `firsts`."""
    begin, larger = group_bytes(bits) - factor_bytes(bits), _everywhere(LARGER)
    found = []
    for part, first in enumerate(firsts):
        span = part * GROUP // len(firsts) // SPANS[bits]
        scales, offsets = (
            builder.fmul(
                builder.fpext(load(builder, source, HALVES, begin + index * LANES * HALF), FLOATS),
                larger,
            )
            for index in (2 * span, 2 * span + 1)
        )
        power = _everywhere(-_power(first))
        found.append((scales, multiply_add(builder, power, scales, offsets)))
    return found


def _moved(builder, vector, from_bit, to_bit, bits):
    """So many bits of each lane, counted from `PLACE` where they are put."""
    left = PLACE + to_bit - from_bit
    moved = (builder.shl if left > 0 else builder.lshr)(vector, constant(abs(left)))
    return builder.and_(moved, constant(((1 << bits) - 1) << (PLACE + to_bit)))


def _value(builder, level, first, scales, offsets):
    """level * scale + offset, of levels that begin at `first`, counted from `PLACE`."""
    level = builder.or_(level, builder.bitcast(_everywhere(_power(first)), INTS))
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
