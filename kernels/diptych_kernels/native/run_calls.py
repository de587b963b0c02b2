"""Runs a table of kernel calls, as Numba compiles it; `call_table.run_all` calls it."""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from diptych_kernels.native.primitives import await_others, ints

NUM_NUMBERS = 2
INT = 8
"""Bytes."""


def entry(width):
    """The kernel for a table whose rows have so many numbers."""

    @njit
    def run(numbers):
        """What each thread does: its part of every call, when all have done theirs of the one
        before."""
        row, count = numbers[:NUM_NUMBERS]
        for _ in range(count):
            _call(ints(row, 1)[0], row + INT)
            await_others()
            row += width * INT

    def run_calls(numbers):
        run(carray(numbers, NUM_NUMBERS))

    return run_calls


@intrinsic
def _call(context, address, numbers):
    """Call a kernel, which is at an address, with the numbers at another."""

    def generate(context, builder, signature, arguments):
        to_numbers = ir.IntType(64).as_pointer()
        kernel = ir.FunctionType(ir.VoidType(), [to_numbers]).as_pointer()
        address, numbers = arguments
        builder.call(builder.inttoptr(address, kernel), [builder.inttoptr(numbers, to_numbers)])
        return context.get_dummy_value()

    return types.void(address, numbers), generate
