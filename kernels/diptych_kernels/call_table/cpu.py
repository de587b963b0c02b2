"""Runs tables of kernel calls."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych_kernels.call_table.calls import WIDTH, run_calls
from diptych_kernels.call_table.known_case import CASE
from diptych_kernels.native.arguments import Table
from diptych_kernels.trust import is_trusted


def is_available() -> bool:
    """Whether there is a kernel that runs tables."""
    return is_trusted(CASE, WIDTH)


def run_all(table: NDArray[np.int64], threads: int) -> None:
    """Let this many threads run the calls of a table [..., WIDTH] together, one after the other.

    What its numbers point to must stay until this returns.
    """
    rows = np.ascontiguousarray(table)
    run_calls().run(Table(rows.ctypes.data, rows.size // WIDTH), threads)
