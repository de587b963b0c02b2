"""The inner loop of the packed product, in LLVM's terms: Numba has no vectors of integers.

A vector has a lane for each of 16 columns of the result, and in each lane two of the values that
are summed over, in 16 bits each, which processors multiply and add in one instruction. Where inputs
have 8 bits it has four of them, a quad.
"""

from __future__ import annotations

import itertools

from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once
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
TOGETHER = 4
"""Rows that are computed together, if there are so many."""
MOST_ROWS = TOGETHER if HAS_WORD_DOTS else 64
"""Rows for which levels are unpacked once, in memory if these are more than those together. With
512 bits that gains nothing: unpacking mostly takes the units that products leave free."""
TILES = VECTORS * WIDTH // LANES
"""Tiles that these vectors fill."""
INTS, FLOATS = ir.VectorType(INT32, WIDTH), ir.VectorType(FLOAT32, WIDTH)
WORDS, HALVES = ir.VectorType(INT16, 2 * WIDTH), ir.VectorType(ir.HalfType(), WIDTH)
VECTOR = WIDTH * FLOAT
"""Size, in bytes, of each of these."""


def tile_product(num_rows, num_tiles, bits, size, in_memory=False):
    """Return a function that computes the rows from `row` to `row + count` of some tiles,
    `num_rows` together. So many are `count`, or if levels are unpacked `in_memory` a multiple of
    it up to `MOST_ROWS`.

    tiles: levels of `bits` bits and their factors, group after group. inputs: [groups, count, 32]
    of `size` bytes, those of these rows after those of the rows before, so that all are close in
    memory.
    factors: likewise [groups, count, 4] float32: a group's scale, its scaled sum, and those of its
    halves. out: [rows, 16 num_tiles] float32, `stride` bytes from row to row; added to if `add`.
    """

    @intrinsic
    def product(context, tiles, groups, inputs, factors, out, stride, add, row, count):
        def generate(context, builder, signature, arguments):
            tiles, groups, inputs, factors, out, stride, add, row, count = arguments
            before = builder.mul(row, groups)  # groups of other rows
            inputs = at(builder, inputs, before, GROUP * size)
            factors = at(builder, factors, before, FACTOR_BYTES)
            out = at(builder, out, row, stride)
            tile_bytes = builder.mul(groups, INT64(group_bytes(bits)))
            vectors = [
                (at(builder, tiles, INT64(tile), tile_bytes), lane)
                for tile in range(num_tiles)
                for lane in range(0, LANES, WIDTH)
            ]
            if not in_memory:
                count = INT64(num_rows)
            sums = _sum_groups(
                builder, bits, size, vectors, groups, inputs, factors, num_rows, count, in_memory
            )
            _put(builder, sums, len(vectors), num_rows, count, out, stride, add)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 9), generate

    return product


def _sum_groups(builder, bits, size, vectors, groups, inputs, factors, num_rows, count, in_memory):
    """A loop over groups, and in it one over blocks of rows. A vector is given as its tile and its
    first lane there. Returns the address of the sums: [blocks, vectors, num_rows] vectors."""
    of_block = num_rows * len(vectors)
    sums = _memory(builder, MOST_ROWS // TOGETHER * of_block)
    levels = _memory(builder, len(vectors) * GROUP * size // FLOAT)
    blocks = builder.udiv(count, INT64(num_rows))

    def begin(block, values):
        own = at(builder, sums, block, of_block * VECTOR)
        for index in range(of_block):
            store(builder, zeros(FLOATS), own, index * VECTOR)
        return values

    def add_group(group, values):
        weights = [(at(builder, tile, group, group_bytes(bits)), lane) for tile, lane in vectors]
        parts = [
            [_parts(builder, own, lane, bits, size, span) for own, lane in weights]
            for span in range(GROUP // SPANS[bits])
        ]
        if in_memory:
            parts = _in_memory(builder, parts, levels)
        before = builder.mul(group, count)

        def add_block(block, values):
            row = builder.add(before, builder.mul(block, INT64(num_rows)))
            own_inputs = at(builder, inputs, row, GROUP * size)
            own_factors = at(builder, factors, row, FACTOR_BYTES)
            own = at(builder, sums, block, of_block * VECTOR)
            _add_group(builder, bits, size, weights, parts, own_inputs, own_factors, own, num_rows)
            return values

        return repeat(builder, blocks, values, add_block)

    repeat(builder, blocks, [], begin)
    repeat(builder, groups, [], add_group)
    return sums


def _memory(builder, number):
    """The address of memory for so many vectors, on the stack."""
    memory = alloca_once(builder, INTS, number)
    memory.align = VECTOR
    return builder.ptrtoint(memory, INT64)


def _in_memory(builder, parts, address):
    """Put levels into memory, from which all blocks of rows read them."""
    offsets = itertools.count(0, VECTOR)

    def put(own):
        kept = []
        for place, levels in own:
            kept.append((place, next(offsets)))
            store(builder, levels, address, kept[-1][1])
        return ((place, load(builder, address, WORDS, offset)) for place, offset in kept)

    return [[put(own) for own in of_span] for of_span in parts]


def _add_group(builder, bits, size, weights, parts, inputs, factors, sums, num_rows):
    """Add to sums in memory: of each vector, those of its rows."""

    def factor(row, place):
        number = load(builder, factors, FLOAT32, row * FACTOR_BYTES + place * FLOAT)
        return everywhere(builder, number, WIDTH)

    # The scale of a row is that of all spans, so the row is multiplied with it once.
    totals, products = ([[None] * num_rows for _ in weights] for _ in range(2))
    for span, of_span in enumerate(parts):
        dots = _dots(builder, size, of_span, inputs, num_rows)
        place = 1 if len(parts) == 1 else 2 + span
        for vector, (own, lane) in enumerate(weights):
            first = group_bytes(bits) - factor_bytes(bits) + (2 * span * LANES + lane) * HALF
            scales, offsets = (
                builder.fpext(load(builder, own, HALVES, first + index * LANES * HALF), FLOATS)
                for index in range(2)
            )
            for row in range(num_rows):
                dot = builder.sitofp(dots[vector][row], FLOATS)
                if span:
                    total = totals[vector][row]
                    product = multiply_add(builder, dot, scales, products[vector][row])
                else:
                    total = load(builder, sums, FLOATS, (vector * num_rows + row) * VECTOR)
                    product = builder.fmul(dot, scales)
                totals[vector][row] = multiply_add(builder, factor(row, place), offsets, total)
                products[vector][row] = product
    for vector in range(len(weights)):
        for row in range(num_rows):
            own = products[vector][row], factor(row, 0), totals[vector][row]
            store(builder, multiply_add(builder, *own), sums, (vector * num_rows + row) * VECTOR)


def _dots(builder, size, parts, inputs, num_rows):
    """Sums of the columns that share factors, as `_add_group` has them. Inputs outside, rows
    inside: sums of different rows do not wait for each other."""
    dots = [[None] * num_rows for _ in parts]
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
    for index in range(QUADS // of_byte):
        vector = load(builder, weights, WORDS, (index * LANES + lane) * QUAD)
        for second in range(of_byte):
            quad = index + second * QUADS // of_byte
            if quad * QUAD // SPANS[bits] != span:
                continue
            levels = builder.lshr(vector, _word(LOW_BITS)) if second else vector
            if bits < BYTE:
                levels = builder.and_(levels, _bytes((1 << LOW_BITS) - 1))
            if LOW_BITS < bits < BYTE:
                levels = builder.or_(levels, _tops(builder, weights, lane, quad))
            if size < WORD:
                yield quad * QUAD * size, levels
                continue
            for odd, own in enumerate(
                (builder.and_(levels, _word((1 << BYTE) - 1)), builder.lshr(levels, _word(BYTE)))
            ):
                yield (quad * QUAD + ORDER.index(odd)) * size, own


def _tops(builder, weights, lane, quad):
    """The highest two bits of 6-bit levels, where they belong."""
    place = QUADS // 2 + quad % (QUADS // 2) // 2
    vector = load(builder, weights, WORDS, (place * LANES + lane) * QUAD)
    down = top_bit(quad) - LOW_BITS
    moved = builder.lshr(vector, _word(down)) if down > 0 else builder.shl(vector, _word(-down))
    return builder.and_(moved, _bytes(TOP << LOW_BITS))


def _word(number):
    """A number in every word."""
    return ir.Constant(WORDS, [INT16(number)] * WORDS.count)


def _bytes(number):
    """A number in every byte."""
    return _word(number << BYTE | number)


def _add_dots(builder, size, sums, levels, inputs):
    """Add the product of two pairs of words, or of two quads of bytes, in each lane; `sums` is None
    if there are none yet.

    With AVX2, which has words only, in the words of assembly, which LLVM leaves in their order: it
    computes products long before it adds them, and one vector's long before another's, and there
    are no registers for them.
    """
    levels = builder.bitcast(levels, INTS)
    if HAS_WORD_DOTS:
        kind = ir.FunctionType(INTS, [INTS] * 3)
        name = "vpdpwssd" if size == WORD else "vpdpbusd"
        add_dots = function(builder, f"llvm.x86.avx512.{name}.512", kind)
        return builder.call(add_dots, [zeros(INTS) if sums is None else sums, levels, inputs])
    if sums is None:
        return _assembled(builder, INTS, "vpmaddwd $2, $1, $0", "=x,x,x", [levels, inputs])
    both = ir.LiteralStructType([INTS, INTS])
    words = "vpmaddwd $3, $2, $1\n\tvpaddd $1, $0, $0"
    both = _assembled(builder, both, words, "=x,=&x,x,x,0", [levels, inputs, sums])
    return builder.extract_value(both, 0)


def _assembled(builder, kind, words, places, values):
    of_call = ir.FunctionType(kind, [INTS] * len(values))
    return builder.call(ir.InlineAsm(of_call, words, places, side_effect=True), values)


def _put(builder, sums, num_vectors, num_rows, count, out, stride, add):
    """Put all sums where they belong, block after block."""

    def put_block(block, values):
        first = builder.mul(block, INT64(num_rows))
        rows = [at(builder, out, builder.add(first, INT64(row)), stride) for row in range(num_rows)]
        targets = [
            builder.add(row, INT64(vector * VECTOR))
            for vector in range(num_vectors)
            for row in rows
        ]
        own = at(builder, sums, first, num_vectors * VECTOR)
        totals = [load(builder, own, FLOATS, n * VECTOR) for n in range(len(targets))]
        with builder.if_else(builder.icmp_signed("!=", add, INT64(0))) as (adds, replaces):
            with adds:
                for total, target in zip(totals, targets, strict=True):
                    there = load(builder, target, FLOATS)
                    store(builder, builder.fadd(there, total), target)
            with replaces:
                for total, target in zip(totals, targets, strict=True):
                    store(builder, total, target)
        return values

    repeat(builder, builder.udiv(count, INT64(num_rows)), [], put_block)
