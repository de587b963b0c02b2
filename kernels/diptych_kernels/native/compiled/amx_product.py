"""The packed product of many rows, as Numba compiles it for processors with a matrix unit.

`packed_product.cpu` calls it. Every stride is in bytes.
"""

from __future__ import annotations

from numba import carray, njit, types
from numba.extending import intrinsic

from diptych_kernels.native.arguments import AmxProduct, record_of
from diptych_kernels.native.compiled.amx import (
    CONFIGURATION_BYTES,
    ROW_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    block_product,
    configure,
    multiply_block,
    release,
)
from diptych_kernels.native.compiled.packed_tile import FLOAT
from diptych_kernels.native.compiled.primitives import await_others, num_threads, thread_index
from diptych_kernels.native.compiled.unpacked_tile import unpack_half, unpack_tile
from diptych_kernels.native.compiled.vectors import repeat, round_32
from diptych_kernels.native.tile_layout import GROUP, group_bytes

ARGUMENTS = record_of(AmxProduct)


def entry(bits):
    """Return the kernel for a matrix whose levels have 4, 6 or 8 bits."""
    two_by_two, two_by_one, one_by_two, one_by_one = (
        block_product(num_a, num_b) for num_a, num_b in ((2, 2), (2, 1), (1, 2), (1, 1))
    )
    unpack, unpacking_product = unpack_tile(bits), _unpacking_product(bits)
    of_group = group_bytes(bits)

    @njit(error_model="numpy")
    def columns_product(
        inputs, weights, groups, rows, out, stride, add, two, following, num_following, target,
        configuration,
    ):  # fmt: skip
        """16 columns, or 32, of all rows, 32 at a time; beside it, so many tiles from `following`
        on are unpacked, to `target`."""
        step_bytes = groups * TILE_BYTES
        # So many blocks of rows are large enough to unpack something beside them; each takes as
        # many halves of tiles.
        blocks = (rows + TILE_ROWS - 1) // (2 * TILE_ROWS) if two else 0
        left = 2 * num_following
        at_once = (left + blocks - 1) // max(blocks, 1)
        for row in range(0, rows, 2 * TILE_ROWS):
            count = min(rows - row, 2 * TILE_ROWS)
            if row == 0 or count < 2 * TILE_ROWS:
                configure(configuration, min(count, TILE_ROWS), max(count - TILE_ROWS, 1))
            a, own_out = inputs + row // TILE_ROWS * step_bytes, out + row * stride
            if count > TILE_ROWS and two and left > 0:
                unpacking_product(
                    a, step_bytes, weights, step_bytes, groups, own_out, stride, add,
                    following, target, (2 * num_following - left) * groups, at_once,
                )  # fmt: skip
                left -= at_once
            elif count > TILE_ROWS and two:
                two_by_two(a, step_bytes, weights, step_bytes, groups, own_out, stride, add)
            elif count > TILE_ROWS:
                two_by_one(a, step_bytes, weights, step_bytes, groups, own_out, stride, add)
            elif two:
                one_by_two(a, step_bytes, weights, step_bytes, groups, own_out, stride, add)
            else:
                one_by_one(a, step_bytes, weights, step_bytes, groups, own_out, stride, add)
        if left > 0:
            unpack(following, num_following * groups, target)

    @njit(error_model="numpy")
    def multiply(given):
        """What each thread does: rounds some rows, then takes all rows through some pairs of tiles,
        one after the other. The next pair is unpacked while this one is multiplied."""
        first, groups, tiles, num_tiles = given.first, given.groups, given.tiles, given.num_tiles
        inputs, stride = given.inputs, given.out_stride
        thread, threads, rows = thread_index(), num_threads(), given.end - first
        for row in range(first + rows * thread // threads, first + rows * (thread + 1) // threads):
            _round_row(given.x + row * given.x_stride, inputs, row - first, groups)
        await_others()
        pair_bytes = 2 * groups * TILE_BYTES
        configuration = given.memory + thread * (CONFIGURATION_BYTES + 2 * pair_bytes)
        weights = configuration + CONFIGURATION_BYTES
        following = weights + pair_bytes
        pairs = (num_tiles + 1) // 2
        first_pair, end_pair = pairs * thread // threads, pairs * (thread + 1) // threads
        if first_pair < end_pair:
            count = min(2, num_tiles - 2 * first_pair)
            unpack(tiles + 2 * first_pair * groups * of_group, count * groups, weights)
        for pair in range(first_pair, end_pair):
            tile = 2 * pair + 2
            columns_product(
                inputs, weights, groups, rows,
                given.out + first * stride + 2 * pair * ROW_BYTES, stride, given.add,
                tile <= num_tiles, tiles + tile * groups * of_group,
                min(tile + 2, 2 * end_pair, num_tiles) - tile, following, configuration,
            )  # fmt: skip
            weights, following = following, weights
        release()

    def amx_product(address):
        multiply(carray(address, 1, ARGUMENTS)[0])

    return amx_product


def _unpacking_product(bits):
    """A product of 32 rows and 32 columns. In each of its steps `at_once` halves of groups are
    unpacked, those of the first step from `half` on."""

    @intrinsic
    def product(
        context, a, a_bytes, b, b_bytes, steps, out, stride, add, tile, target, half, at_once
    ):
        def generate(context, builder, signature, arguments):
            *factors, tile, target, half, at_once = arguments

            def unpack_some(step):
                first = builder.add(half, builder.mul(step, at_once))

                def unpack_one(index, values):
                    unpack_half(builder, bits, tile, builder.add(first, index), target)
                    return values

                repeat(builder, at_once, [], unpack_one)

            multiply_block(builder, 2, 2, factors, unpack_some)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 12), generate

    return product


@njit
def _round_row(source, inputs, row, groups):
    """Put a row where the tiles of its 16 rows are."""
    place = inputs + (row // TILE_ROWS * groups * TILE_ROWS + row % TILE_ROWS) * ROW_BYTES
    for group in range(groups):
        round_32(source + group * GROUP * FLOAT, place + group * TILE_BYTES)
