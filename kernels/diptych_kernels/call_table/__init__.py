"""Tables of kernel calls for CPUs, which one call from Python runs, as a CUDA graph does for a GPU.

A layer has about nine kernels. For a few tokens each of them takes less time than Python needs to
call it.
"""

from __future__ import annotations

from diptych_kernels.call_table.cpu import WIDTH, is_available, rows_of, run_all

__all__ = ["WIDTH", "is_available", "rows_of", "run_all"]
