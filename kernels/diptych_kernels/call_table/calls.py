"""The rows of a table of kernel calls, and the kernel that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.kernel import Call, Kernel, kernel_of

MAX_NUMBERS: Final = 20
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


@remembered
def run_calls() -> Kernel:
    """Return the kernel that runs a table of calls; it is loaded at first use."""
    return kernel_of("run_calls", WIDTH)
