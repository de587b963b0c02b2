"""The test case for the kernel that runs tables of calls."""

from __future__ import annotations

from diptych_kernels.call_table.calls import rows_of
from diptych_kernels.native.arguments import Table
from diptych_kernels.native.kernel import Kernel
from diptych_kernels.silu_mul import calls as silu_mul
from diptych_kernels.trust import KnownCase, Results, random_values, unwritten


def _results(kernel: Kernel) -> Results:
    """A table of two calls. A fault of the called kernel would be in both results."""
    x, actual, expected = random_values(2, 3, 150), unwritten(2, 3, 75), unwritten(2, 3, 75)
    table = rows_of([silu_mul.call(x[i], actual[i]) for i in range(2)])
    kernel.run(Table(table.ctypes.data, len(table)), 1)
    for i in range(2):
        called, arguments = silu_mul.call(x[i], expected[i])
        called.run(arguments, 1)
    return actual, expected


CASE = KnownCase("run_calls", _results, tolerance=0.0)
