"""Tables of kernel calls for CPUs, which one call from Python runs, as a CUDA graph does for a GPU.

A layer has about nine kernels. For a few tokens each of them takes less time than Python needs to
call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_kernels.native.arguments import Table
from diptych_kernels.native.kernel import Call, Kernel, kernel_of
from diptych_kernels.silu_mul import cpu as silu_mul
from diptych_kernels.trust import KnownCase, Results, is_trusted, random_values, unwritten

MAX_NUMBERS: Final = 21
WIDTH: Final = 1 + MAX_NUMBERS
"""Length of a row: the kernel's address and then its numbers."""


def rows_of(calls: Sequence[Call]) -> NDArray[np.int64]:
    """Return the rows of a table, [calls, WIDTH]."""
    rows = np.zeros((len(calls), WIDTH), np.int64)
    for row, (kernel, arguments) in zip(rows, calls, strict=True):
        row[0] = kernel.address
        numbers = np.frombuffer(memoryview(arguments), np.int64)
        row[1 : 1 + numbers.size] = numbers
    return rows


def is_available() -> bool:
    """Whether there is a kernel that runs tables."""
    return is_trusted(CASE, WIDTH)


def run_all(table: NDArray[np.int64], threads: int) -> None:
    """Let this many threads run the calls of a table [..., WIDTH] together, one after the other.

    What its numbers point to must stay until this returns.
    """
    rows = np.ascontiguousarray(table)
    kernel_of("run_calls", WIDTH).run(Table(rows.ctypes.data, rows.size // WIDTH), threads)


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
