"""Vectors of 16 lanes, in LLVM's terms, for loops whose sums must stay in registers.

Numba has no such vectors, and decides by itself what to keep in registers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic

LANES = 16
INT16, INT32, INT64, FLOAT32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS = ir.VectorType(INT32, LANES), ir.VectorType(FLOAT32, LANES)


def target_has(feature):
    """Whether the target processor has a feature, by LLVM's name."""
    return f"+{feature}" in config.CPU_FEATURES.split(",")


def repeat(builder, count, values, body):
    """Return `values` after `count` rounds, at least one, of `values = body(index, values)`."""
    before, loop = builder.block, builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    current = [builder.phi(value.type) for value in values]
    after = body(index, current)
    following = builder.add(index, INT64(1))
    last = builder.block  # the body may have loops of its own
    for phi, first, next_one in zip(
        [index, *current], [INT64(0), *values], [following, *after], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(next_one, last)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
    builder.position_at_end(end)
    return after


def zeros(kind):
    return ir.Constant(kind, None)


def constant(number):
    """Return an int32 in every lane."""
    return ir.Constant(INTS, [INT32(number)] * LANES)


def multiply_add(builder, x, y, z):
    """x * y + z, for vectors of any number of lanes."""
    kind = ir.FunctionType(x.type, [x.type] * 3)
    name = f"llvm.fmuladd.v{x.type.count}f32"
    return builder.call(function(builder, name, kind), [x, y, z])


def everywhere(builder, value, lanes=LANES):
    """Return a number in every lane."""
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(first, first, zeros(ir.VectorType(INT32, lanes)))


def at(builder, address, index, num_bytes):
    """Return the address of an element of an array whose elements have this many bytes. The index
    is an int or a value."""
    size = INT64(num_bytes) if isinstance(num_bytes, int) else num_bytes
    return builder.add(address, builder.mul(index, size))


def load(builder, address, kind, offset=0):
    pointer = builder.inttoptr(builder.add(address, INT64(offset)), kind.as_pointer())
    return builder.load(pointer, align=1)


def store(builder, value, address, offset=0):
    pointer = builder.inttoptr(builder.add(address, INT64(offset)), value.type.as_pointer())
    builder.store(value, pointer, align=1)


def function(builder, name, kind):
    """Return one of LLVM's own functions."""
    known = builder.module.globals
    return known[name] if name in known else ir.Function(builder.module, kind, name)


def sums_across(builder, vectors):
    """Return the sum over the lanes of each of 16 vectors, in the lane of that vector's number. Two
    vectors become one of half sums, two of these one of quarter sums, and so on."""
    while len(vectors) > 1:
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [_half_sums(builder, *pair, len(vectors) // 2) for pair in pairs]
    return vectors[0]


def _half_sums(builder, first, second, span):
    """Add lanes that are `span` apart, within each block of `2 span` lanes. The result has, for
    each block, the sums of the first vector, then those of the second."""
    blocks = range(0, LANES, 2 * span)
    low = [of + block + lane for block in blocks for of in (0, LANES) for lane in range(span)]
    halves = [
        builder.shuffle_vector(first, second, _lanes([lane + offset for lane in low]))
        for offset in (0, span)
    ]
    return builder.fadd(*halves)


def _lanes(numbers):
    return ir.Constant(ir.VectorType(INT32, LANES), [INT32(number) for number in numbers])


@intrinsic
def largest_of_64(context, address):
    """Return the largest of 64 float32 numbers; a NaN among them may be ignored."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(FLOATS, [FLOATS] * 2)
        larger = function(builder, "llvm.maxnum.v16f32", kind)
        first, *others = [load(builder, arguments[0], FLOATS, place) for place in range(0, 256, 64)]
        for other in others:
            first = builder.call(larger, [first, other], fastmath=("nnan",))
        kind = ir.FunctionType(FLOAT32, [FLOATS])
        reduce = function(builder, "llvm.vector.reduce.fmax.v16f32", kind)
        return builder.call(reduce, [first], fastmath=("nnan",))

    return types.float32(address), generate


@intrinsic
def copy_16(context, source, target):
    """Copy 16 float32 numbers."""

    def generate(context, builder, signature, arguments):
        source, target = arguments
        store(builder, load(builder, source, FLOATS), target)
        return context.get_dummy_value()

    return types.void(source, target), generate


@intrinsic
def widen_16(context, source, target):
    """Convert 16 bfloat16 numbers to float32."""

    def generate(context, builder, signature, arguments):
        source, target = arguments
        halves = load(builder, source, ir.VectorType(INT16, LANES))
        bits = builder.shl(builder.zext(halves, INTS), constant(16))
        store(builder, builder.bitcast(bits, FLOATS), target)
        return context.get_dummy_value()

    return types.void(source, target), generate


@intrinsic
def round_32(context, source, target):
    """Round 32 float32 numbers to the nearest bfloat16 ones, ties to even; NaN stays NaN. This is
    for processors with AVX512-BF16, whose instruction treats numbers below 2^-126 as zero."""

    def generate(context, builder, signature, arguments):
        source, target = arguments
        low, high = (load(builder, source, FLOATS, half * LANES * 4) for half in range(2))
        store(builder, rounded_32(builder, low, high), target)
        return context.get_dummy_value()

    return types.void(source, target), generate


def rounded_32(builder, low, high):
    """Return what `round_32` writes."""
    kind = ir.FunctionType(INTS, [FLOATS] * 2)
    # LLVM's own name for it has a type that llvmlite does not know.
    halves = ir.InlineAsm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")
    return builder.call(halves, [low, high])
