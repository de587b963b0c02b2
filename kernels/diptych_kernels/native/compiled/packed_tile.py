"""The inner loop of the packed product, in LLVM's terms: Numba has no vectors of integers.

A vector has a lane for each of 16 columns of the result, and in each lane a pair: two of the values
that are summed over, in 16 bits each, which processors multiply and add in one instruction.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.vectors import (
    FLOAT32,
    INT16,
    INT32,
    INT64,
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
from diptych_kernels.native.tile_layout import (
    BYTE,
    GROUP,
    HALF,
    LOW_BITS,
    QUAD,
    QUADS,
    SPANS,
    TOP,
    factor_bytes,
    group_bytes,
    top_bit,
)

FLOAT, WORD = 4, 2
"""Sizes in bytes."""
GROUP_BYTES, FACTOR_BYTES = GROUP * WORD, 4 * FLOAT
"""The sizes of a group of one row's inputs, and of its scale, its scaled sum, and those of its
halves."""
ORDER = (0, 2, 1, 3)
"""The order in which the four inputs of a quad lie: a word of a tile holds values 0 and 1 of a
quad, or 2 and 3, so a lane's two words, masked or shifted alike, hold values 0 and 2, or 1 and
3."""


HAS_WORD_DOTS = target_has("avx512vnni")
"""Whether one instruction adds products of pairs of 16-bit words to sums."""
WIDTH = LANES if HAS_WORD_DOTS else LANES // 2
"""Columns of a vector: a register has 512 bits, or 256 with AVX2."""
FEW_ROWS = 2
INTS, FLOATS = ir.VectorType(INT32, WIDTH), ir.VectorType(FLOAT32, WIDTH)
WORDS, HALVES = ir.VectorType(INT16, 2 * WIDTH), ir.VectorType(ir.HalfType(), WIDTH)


def tile_product(num_rows, bits):
    """Return a function that computes the rows from `row` to `row + num_rows` of a tile.

    tile: levels of `bits` bits and their factors, group after group. inputs: [groups, num_rows, 32]
    int16, those of these rows after those of the rows before, so that all are close in memory.
    factors: likewise [groups, num_rows, 4] float32: a group's scale, its scaled sum, and those of
    its halves. out: [rows, 16] float32, `stride` bytes from row to row; added to if `add`.
    """

    @intrinsic
    def product(context, tile, groups, inputs, factors, out, stride, add, row):
        def generate(context, builder, signature, arguments):
            tile, groups, inputs, factors, out, stride, add, row = arguments
            before = builder.mul(row, groups)  # groups of other rows
            inputs = at(builder, inputs, before, GROUP_BYTES)
            factors = at(builder, factors, before, FACTOR_BYTES)
            rows = [builder.add(row, INT64(index)) for index in range(num_rows)]
            for lanes in _passes(num_rows):
                sums = _sum_groups(builder, bits, tile, lanes, groups, inputs, factors, num_rows)
                for lane, own in zip(lanes, sums, strict=True):
                    _put(builder, own, at(builder, out, INT64(lane), FLOAT), stride, add, rows)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return product


def _passes(num_rows):
    """The first columns of the vectors of each pass over a tile. For few rows, one pass takes all
    columns, since reading the tile takes longest; for many rows, a pass takes as many columns as
    the registers have room for."""
    lanes = range(0, LANES, WIDTH)
    return [lanes] if num_rows <= FEW_ROWS else [[lane] for lane in lanes]


def _sum_groups(builder, bits, tile, lanes, groups, inputs, factors, num_rows):
    """A loop over groups; returns the sums of each row, for each vector of columns."""

    def add_group(group, sums):
        weights = at(builder, tile, group, group_bytes(bits))
        own_inputs = at(builder, inputs, group, num_rows * GROUP_BYTES)
        own_factors = at(builder, factors, group, num_rows * FACTOR_BYTES)
        added = []
        for lane in lanes:
            own, sums = sums[:num_rows], sums[num_rows:]
            added += _add_group(builder, bits, weights, lane, own_inputs, own_factors, own)
        return added

    sums = repeat(builder, groups, [zeros(FLOATS)] * num_rows * len(lanes), add_group)
    return [sums[first : first + num_rows] for first in range(0, len(sums), num_rows)]


def _add_group(builder, bits, weights, lane, inputs, factors, sums):
    spans = GROUP // SPANS[bits]
    for span in range(spans):
        dots = _dots(builder, bits, weights, lane, inputs, len(sums), span)
        first = group_bytes(bits) - factor_bytes(bits) + (2 * span * LANES + lane) * HALF
        scales, offsets = (
            builder.fpext(load(builder, weights, HALVES, first + index * LANES * HALF), FLOATS)
            for index in range(2)
        )
        own_sum = (1 if spans == 1 else 2 + span) * FLOAT
        added = []
        for row, (dot, total) in enumerate(zip(dots, sums, strict=True)):
            scale, scaled_sum = (
                everywhere(
                    builder, load(builder, factors, FLOAT32, row * FACTOR_BYTES + place), WIDTH
                )
                for place in (0, own_sum)
            )
            product = builder.fmul(builder.sitofp(dot, FLOATS), scale)
            total = multiply_add(builder, product, scales, total)
            added.append(multiply_add(builder, scaled_sum, offsets, total))
        sums = added
    return sums


def _dots(builder, bits, weights, lane, inputs, num_rows, span):
    """Sums of the columns that share factors. Pairs outside, rows inside: sums of different rows do
    not wait for each other."""
    dots = [zeros(INTS)] * num_rows
    for place, levels in _pairs(builder, weights, lane, bits, span):
        for row in range(num_rows):
            pair = load(builder, inputs, INT32, row * GROUP_BYTES + place)
            pair = everywhere(builder, pair, WIDTH)
            dots[row] = _add_dots(builder, dots[row], levels, pair)
    return dots


def _pairs(builder, weights, lane, bits, span):
    """Yield a span's levels as vectors of words, each after the place of its pair of inputs.

    Two quads of less than 8 bits share their bytes: the lowest bits of a word are value 0 or 2 of
    the first quad, the next ones that of the second, and the upper byte holds values 1 or 3.
    """
    of_byte = 1 if bits == BYTE else BYTE // LOW_BITS
    of_part = BYTE // of_byte
    for index in range(QUADS // of_byte):
        words = load(builder, weights, WORDS, (index * LANES + lane) * QUAD)
        for number in range(2 * of_byte):
            odd, second = divmod(number, of_byte)
            quad = index + second * QUADS // of_byte
            if quad * QUAD // SPANS[bits] != span:
                continue
            place = (quad * QUAD + ORDER.index(odd)) * WORD
            levels = builder.lshr(words, _word(number * of_part)) if number else words
            if number < 2 * of_byte - 1:
                levels = builder.and_(levels, _word((1 << of_part) - 1))
            if bits > of_part:
                levels = builder.or_(levels, _tops(builder, weights, lane, quad, odd))
            yield place, levels


def _tops(builder, weights, lane, quad, odd):
    """The highest two bits of 6-bit levels, where they belong."""
    vector = QUADS // 2 + quad % (QUADS // 2) // 2
    words = load(builder, weights, WORDS, (vector * LANES + lane) * QUAD)
    down = odd * BYTE + top_bit(quad) - LOW_BITS
    moved = builder.lshr(words, _word(down)) if down > 0 else builder.shl(words, _word(-down))
    return builder.and_(moved, _word(TOP << LOW_BITS))


def _word(number):
    """A number in every word."""
    return ir.Constant(WORDS, [INT16(number)] * WORDS.count)


def _add_dots(builder, sums, levels, inputs):
    """Add the product of two pairs of words in each lane."""
    if HAS_WORD_DOTS:
        kind = ir.FunctionType(INTS, [INTS] * 3)
        add_dots = function(builder, "llvm.x86.avx512.vpdpwssd.512", kind)
        return builder.call(add_dots, [sums, builder.bitcast(levels, INTS), inputs])
    multiply = function(builder, "llvm.x86.avx2.pmadd.wd", ir.FunctionType(INTS, [WORDS] * 2))
    return builder.add(sums, builder.call(multiply, [levels, builder.bitcast(inputs, WORDS)]))


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
