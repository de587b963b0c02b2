"""The matrix unit of x86-64 processors (AMX), in LLVM's terms: products of bfloat16 tiles.

A tile is a register of 16 rows of 64 bytes. `sums[16, 16] += a[16, 32] b[32, 16]` is one
instruction: `b` is stored in pairs, so that row r has elements 2 r and 2 r + 1 of every column.
Sums are float32. (Intel's Architectures Software Developer's Manual, volume 1, chapter 18.)
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from diptych_kernels.native.compiled.primitives import small_ints
from diptych_kernels.native.compiled.vectors import INT64, at, function, repeat

TILE_ROWS = 16
ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * ROW_BYTES
CONFIGURATION_BYTES = 64

INT8 = ir.IntType(8)
BYTES = ir.PointerType(INT8)
SUMS, FACTORS_A, FACTORS_B = 0, 4, 6
"""The first tile of each kind: four of sums, two of each factor."""


@njit
def configure(memory, first_rows, second_rows):
    """Set how many rows the tiles of sums and of `a` have: those of the first 16 rows, and those of
    the next.

    memory: 64 bytes for it.
    """
    x = small_ints(memory, CONFIGURATION_BYTES)
    for i in range(CONFIGURATION_BYTES):
        x[i] = 0
    x[0] = 1  # the only palette there is
    for tile in range(8):
        x[16 + 2 * tile] = ROW_BYTES
        is_second = tile in (SUMS + 2, SUMS + 3, FACTORS_A + 1)
        x[48 + tile] = second_rows if is_second else first_rows
    x[48 + FACTORS_B] = x[48 + FACTORS_B + 1] = TILE_ROWS
    _load_configuration(memory)


@intrinsic
def _load_configuration(context, memory):
    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [BYTES])
        load = function(builder, "llvm.x86.ldtilecfg", kind)
        builder.call(load, [builder.inttoptr(arguments[0], BYTES)])
        return context.get_dummy_value()

    return types.void(memory), generate


@intrinsic
def release(context):
    """Release the tiles: the system need not save them at later thread switches."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(function(builder, "llvm.x86.tilerelease", kind), [])
        return context.get_dummy_value()

    return types.void(), generate


def block_product(num_a, num_b, row_bytes=None):
    """Return a function that computes up to 16 `num_a` rows of 16 `num_b` columns.

    a: for each 16 rows [steps] tiles, `a_bytes` from one to the next; or rows of `row_bytes`, of
    which a tile takes 64. b: for each 16 columns [steps] tiles, `b_bytes` from one to the next.
    out: float32, `stride` bytes from row to row; added to if `add`.
    """

    @intrinsic
    def product(context, a, a_bytes, b, b_bytes, steps, out, stride, add):
        def generate(context, builder, signature, arguments):
            multiply_block(builder, num_a, num_b, arguments, row_bytes=row_bytes)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return product


def multiply_block(builder, num_a, num_b, arguments, beside=None, row_bytes=None):
    """Do the work of a `block_product`. `beside(step)` is called in each step, because the matrix
    unit and the vector units work at the same time."""
    a, a_bytes, b, b_bytes, steps, out, stride, add = arguments
    blocks = [(i, j, SUMS + 2 * i + j) for i in range(num_a) for j in range(num_b)]
    in_tiles = ROW_BYTES, TILE_BYTES
    in_rows = (row_bytes, ROW_BYTES) if row_bytes else in_tiles
    factors = [
        *((FACTORS_A + i, at(builder, a, INT64(i), a_bytes), *in_rows) for i in range(num_a)),
        *((FACTORS_B + j, at(builder, b, INT64(j), b_bytes), *in_tiles) for j in range(num_b)),
    ]
    sixteen_rows = builder.mul(stride, INT64(TILE_ROWS))
    sums = [
        (tile, at(builder, builder.add(out, INT64(j * ROW_BYTES)), INT64(i), sixteen_rows))
        for i, j, tile in blocks
    ]
    with builder.if_else(builder.icmp_signed("!=", add, INT64(0))) as (adds, begins):
        with adds:
            for tile, place in sums:
                _move(builder, "tileloadd64", tile, place, stride)
        with begins:
            for tile, _ in sums:
                _do(builder, "tilezero", tile)

    def add_step(index, values):
        for tile, first, row, step in factors:
            place = at(builder, first, index, step)
            _move(builder, "tileloadd64", tile, place, INT64(row))
        for i, j, tile in blocks:
            _do(builder, "tdpbf16ps", tile, FACTORS_A + i, FACTORS_B + j)
        if beside is not None:
            beside(index)
        return values

    repeat(builder, steps, [], add_step)
    for tile, place in sums:
        _move(builder, "tilestored64", tile, place, stride)


def _do(builder, name, *tiles):
    kind = ir.FunctionType(ir.VoidType(), [INT8] * len(tiles))
    builder.call(function(builder, f"llvm.x86.{name}", kind), [INT8(tile) for tile in tiles])


def _move(builder, name, tile, address, stride):
    """Between a tile and memory."""
    kind = ir.FunctionType(ir.VoidType(), [INT8, BYTES, INT64])
    pointer = builder.inttoptr(address, BYTES)
    builder.call(function(builder, f"llvm.x86.{name}", kind), [INT8(tile), pointer, stride])
