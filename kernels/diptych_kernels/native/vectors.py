"""Vectors of 16 lanes, in LLVM's terms: for loops whose sums must stay in registers.

Numba has no such vectors, and decides by itself what to keep where.
"""

from __future__ import annotations

from llvmlite import ir

LANES = 16
INT32, INT64, FLOAT32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS = ir.VectorType(INT32, LANES), ir.VectorType(FLOAT32, LANES)


def repeat(builder, count, values, body):
    """What `values` are after `count` rounds, at least one, of `values = body(index, values)`."""
    before, loop = builder.block, builder.append_basic_block("loop")
    end = builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INT64)
    current = [builder.phi(value.type) for value in values]
    after = body(index, current)
    following = builder.add(index, INT64(1))
    for phi, first, next_one in zip(
        [index, *current], [INT64(0), *values], [following, *after], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(next_one, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
    builder.position_at_end(end)
    return after


def zeros(kind):
    return ir.Constant(kind, None)


def multiply_add(builder, x, y, z):
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(function(builder, "llvm.fmuladd.v16f32", kind), [x, y, z])


def everywhere(builder, value):
    """A number in every lane."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(first, first, zeros(INTS))


def at(builder, address, index, num_bytes):
    """The address of something in an array of things of so many bytes, an int or a value."""
    size = INT64(num_bytes) if isinstance(num_bytes, int) else num_bytes
    return builder.add(address, builder.mul(index, size))


def load(builder, address, kind, offset=0):
    pointer = builder.inttoptr(builder.add(address, INT64(offset)), kind.as_pointer())
    return builder.load(pointer, align=1)


def store(builder, value, address, offset=0):
    pointer = builder.inttoptr(builder.add(address, INT64(offset)), value.type.as_pointer())
    builder.store(value, pointer, align=1)


def function(builder, name, kind):
    """One of LLVM's own."""
    known = builder.module.globals
    return known[name] if name in known else ir.Function(builder.module, kind, name)
