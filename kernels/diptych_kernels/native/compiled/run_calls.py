"""Runs a table of kernel calls, as Numba compiles it; `call_table.run_all` calls it."""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from diptych_kernels.native.arguments import Table, record_of
from diptych_kernels.native.compiled.primitives import await_others, ints

ARGUMENTS = record_of(Table)
INT = 8
"""Size in bytes."""


def entry(width):
    """Return the kernel for a table whose rows have this many numbers."""

    @njit
    def run(given):
        """What each thread does: its part of every call, when all have done theirs of the one
        before."""
        row = given.rows
        for _ in range(given.num_calls):
            _call(ints(row, 1)[0], row + INT)
            await_others()
            row += width * INT

    def run_calls(address):
        run(carray(address, 1, ARGUMENTS)[0])

    return run_calls


@intrinsic
def _call(context, address, record):
    """Call a kernel, which is at an address, with the record at another."""

    def generate(context, builder, signature, arguments):
        to_record = ir.IntType(8).as_pointer()
        kernel = ir.FunctionType(ir.VoidType(), [to_record]).as_pointer()
        address, record = arguments
        builder.call(builder.inttoptr(address, kernel), [builder.inttoptr(record, to_record)])
        return context.get_dummy_value()

    return types.void(address, record), generate
