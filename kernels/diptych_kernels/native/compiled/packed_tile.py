"""The inner loop of the packed product, in LLVM's terms: Numba has no vectors of integers.

A vector has a lane for each of 16 columns of the result, and in each lane two of the values that
are summed over, in 16 bits each, which processors multiply and add in one instruction. Where inputs
have 8 bits it has four of them, a quad.
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
FACTOR_BYTES = 4 * FLOAT
"""The size of the scale of a group of one row's inputs, its scaled sum, and those of its halves."""
ORDER = (0, 2, 1, 3)
"""The order in which the four inputs of a quad lie: a word of a tile holds values 0 and 1 of a
quad, or 2 and 3, so a lane's two words, masked or shifted alike, hold values 0 and 2, or 1 and
3."""


HAS_WORD_DOTS = target_has("avx512vnni")
"""Whether one instruction adds products of pairs of 16-bit words to sums."""
WIDTH = LANES if HAS_WORD_DOTS else LANES // 2
"""Columns of a vector: a register has 512 bits, or 256 with AVX2."""
VECTORS = 2
"""Vectors that are computed together: each pair of inputs is read once for both. More, or more than
four rows of them, leave no registers for unpacked levels."""
TILES = VECTORS * WIDTH // LANES
"""Tiles that these vectors fill."""
INTS, FLOATS = ir.VectorType(INT32, WIDTH), ir.VectorType(FLOAT32, WIDTH)
WORDS, HALVES = ir.VectorType(INT16, 2 * WIDTH), ir.VectorType(ir.HalfType(), WIDTH)


def tile_product(num_rows, num_tiles, bits, size):
    """Return a function that computes the rows from `row` to `row + num_rows` of some tiles.

    tiles: levels of `bits` bits and their factors, group after group. inputs: [groups, num_rows,
    32] of `size` bytes, those of these rows after those of the rows before, so that all are close
    in memory.
    factors: likewise [groups, num_rows, 4] float32: a group's scale, its scaled sum, and those of
    its halves. out: [rows, 16 num_tiles] float32, `stride` bytes from row to row; added to if
    `add`.
    """

    @intrinsic
    def product(context, tiles, groups, inputs, factors, out, stride, add, row):
        def generate(context, builder, signature, arguments):
            tiles, groups, inputs, factors, out, stride, add, row = arguments
            before = builder.mul(row, groups)  # groups of other rows
            inputs = at(builder, inputs, before, GROUP * size)
            factors = at(builder, factors, before, FACTOR_BYTES)
            rows = [builder.add(row, INT64(index)) for index in range(num_rows)]
            tile_bytes = builder.mul(groups, INT64(group_bytes(bits)))
            vectors = [
                (at(builder, tiles, INT64(tile), tile_bytes), lane)
                for tile in range(num_tiles)
                for lane in range(0, LANES, WIDTH)
            ]
            sums = _sum_groups(builder, bits, size, vectors, groups, inputs, factors, num_rows)
            for index, own in enumerate(sums):
                target = builder.add(out, INT64(index * WIDTH * FLOAT))
                _put(builder, own, target, stride, add, rows)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return product


def _sum_groups(builder, bits, size, vectors, groups, inputs, factors, num_rows):
    """A loop over groups; returns the sums of each row, for each vector of columns. A vector is
    given as its tile and its first lane there."""

    def of_vectors(sums):
        return [sums[first : first + num_rows] for first in range(0, len(sums), num_rows)]

    def add_group(group, sums):
        weights = [(at(builder, tile, group, group_bytes(bits)), lane) for tile, lane in vectors]
        own_inputs = at(builder, inputs, group, num_rows * GROUP * size)
        own_factors = at(builder, factors, group, num_rows * FACTOR_BYTES)
        added = _add_group(builder, bits, size, weights, own_inputs, own_factors, of_vectors(sums))
        return [total for own in added for total in own]

    return of_vectors(repeat(builder, groups, [zeros(FLOATS)] * num_rows * len(vectors), add_group))


def _add_group(builder, bits, size, weights, inputs, factors, sums):
    """sums, and the result: of each vector, those of its rows."""
    spans, num_rows = GROUP // SPANS[bits], len(sums[0])

    def factor(row, place):
        number = load(builder, factors, FLOAT32, row * FACTOR_BYTES + place * FLOAT)
        return everywhere(builder, number, WIDTH)

    # The scale of a row is that of all spans, so the row is multiplied with it once.
    products = [[zeros(FLOATS)] * num_rows for _ in weights]
    for span in range(spans):
        dots = _dots(builder, bits, size, weights, inputs, num_rows, span)
        place = 1 if spans == 1 else 2 + span
        for vector, (own, lane) in enumerate(weights):
            first = group_bytes(bits) - factor_bytes(bits) + (2 * span * LANES + lane) * HALF
            scales, offsets = (
                builder.fpext(load(builder, own, HALVES, first + index * LANES * HALF), FLOATS)
                for index in range(2)
            )
            for row in range(num_rows):
                dot = builder.sitofp(dots[vector][row], FLOATS)
                total = sums[vector][row]
                sums[vector][row] = multiply_add(builder, factor(row, place), offsets, total)
                products[vector][row] = (
                    multiply_add(builder, dot, scales, products[vector][row])
                    if span
                    else builder.fmul(dot, scales)
                )
    return [
        [
            multiply_add(builder, product, factor(row, 0), total)
            for row, (product, total) in enumerate(zip(*own, strict=True))
        ]
        for own in zip(products, sums, strict=True)
    ]


def _dots(builder, bits, size, weights, inputs, num_rows, span):
    """Sums of the columns that share factors, as `_add_group` has them. Inputs outside, rows
    inside: sums of different rows do not wait for each other."""
    dots = [[zeros(INTS)] * num_rows for _ in weights]
    parts = [_parts(builder, own, lane, bits, size, span) for own, lane in weights]
    for found in zip(*parts, strict=True):
        for row in range(num_rows):
            part = load(builder, inputs, INT32, row * GROUP * size + found[0][0])
            part = everywhere(builder, part, WIDTH)
            for own, (_, levels) in zip(dots, found, strict=True):
                own[row] = _add_dots(builder, size, own[row], levels, part)
    return dots


def _parts(builder, weights, lane, bits, size, span):
    """Yield a span's levels as vectors of words or bytes, each after the place of its inputs.

    Two quads of less than 8 bits share their bytes: the lowest bits of a byte are a value of the
    first quad, the next ones one of the second. The upper byte of a word holds values 1 or 3.
    """
    of_byte = 1 if bits == BYTE else BYTE // LOW_BITS
    of_part = BYTE // of_byte
    for index in range(QUADS // of_byte):
        vector = load(builder, weights, WORDS, (index * LANES + lane) * QUAD)
        for number in range(size * of_byte):
            odd, second = divmod(number, of_byte)
            quad = index + second * QUADS // of_byte
            if quad * QUAD // SPANS[bits] != span:
                continue
            levels = builder.lshr(vector, _word(number * of_part)) if number else vector
            if of_part < BYTE * size and number < 2 * of_byte - 1:
                levels = builder.and_(levels, _mask((1 << of_part) - 1, size))
            if bits > of_part:
                levels = builder.or_(levels, _tops(builder, weights, lane, size, quad, odd))
            yield (quad * QUAD + ORDER.index(odd)) * size, levels


def _tops(builder, weights, lane, size, quad, odd):
    """The highest two bits of 6-bit levels, where they belong."""
    place = QUADS // 2 + quad % (QUADS // 2) // 2
    vector = load(builder, weights, WORDS, (place * LANES + lane) * QUAD)
    down = odd * BYTE + top_bit(quad) - LOW_BITS
    moved = builder.lshr(vector, _word(down)) if down > 0 else builder.shl(vector, _word(-down))
    return builder.and_(moved, _mask(TOP << LOW_BITS, size))


def _word(number):
    """A number in every word."""
    return ir.Constant(WORDS, [INT16(number)] * WORDS.count)


def _mask(number, size):
    """The bits of a byte in everything that has `size` bytes."""
    return _word(number if size == WORD else number << BYTE | number)


def _add_dots(builder, size, sums, levels, inputs):
    """Add the product of two pairs of words, or of two quads of bytes, in each lane.

    With AVX2, which has words only, in the words of assembly: LLVM computes products long before it
    adds them, and there are no registers for them.
    """
    levels = builder.bitcast(levels, INTS)
    if HAS_WORD_DOTS:
        kind = ir.FunctionType(INTS, [INTS] * 3)
        name = "vpdpwssd" if size == WORD else "vpdpbusd"
        add_dots = function(builder, f"llvm.x86.avx512.{name}.512", kind)
        return builder.call(add_dots, [sums, levels, inputs])
    kind = ir.FunctionType(ir.LiteralStructType([INTS, INTS]), [INTS] * 3)
    words = "vpmaddwd $3, $2, $1\n\tvpaddd $1, $0, $0"
    both = builder.call(ir.InlineAsm(kind, words, "=x,=&x,x,x,0"), [levels, inputs, sums])
    return builder.extract_value(both, 0)


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
