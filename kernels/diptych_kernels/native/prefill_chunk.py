"""The arguments of a chunk of a prompt for the kernel for CPUs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PARTITION = 64
"""Keys whose weights are computed together. Partitions begin at multiples of this constant, so that
the way a prompt is divided into chunks changes no bit of its results."""
ROWS_TOGETHER = 48
"""Rows that a thread computes together, so that they share what it reads: a multiple of the rows of
each kernel's tiles."""
LANES = 16
"""Sums of weights of a row, which are added up at its end."""
EVERYTHING = 1 << 40
"""A window that is wider than any context."""


class ChunkNumbers:
    """The new tokens of one sequence; one object serves all layers."""

    def __init__(
        self,
        rows: slice,
        length: int,
        blocks: NDArray[np.int64],
        block_size: int,
        window: int | None,
    ) -> None:
        """rows: the new tokens in the batch. length: of the context, with the new tokens. blocks:
        [>= blocks of the context]."""
        self.rows = rows
        self._length, self._block_size = length, block_size
        self._num_tokens = rows.stop - rows.start
        self._blocks = np.ascontiguousarray(blocks)
        self._window = window or EVERYTHING
        first_key = max(length - self._num_tokens + 1 - self._window, 0)
        self._begin = first_key // PARTITION * PARTITION
        self._arguments: tuple[int, ...] = ()
        self._threads = 0

    def arguments(self, heads: int, kv_heads: int, head_dim: int, threads: int) -> tuple[int, ...]:
        """Return the arguments of `ChunkAttention` that are the same for all layers: from the
        ninth on."""
        if threads != self._threads:  # each has memory of its own
            self._threads = threads
            num_keys = -(-(self._length - self._begin) // PARTITION) * PARTITION
            # Keys as float32, or keys and values as bfloat16.
            self._keys = np.empty((kv_heads, num_keys, head_dim), np.float32)
            # Of each row: query, sum of values, scores, their maximum, sums of weights. Values of
            # a partition, or weights; the configuration of a matrix unit.
            of_rows = ROWS_TOGETHER * (2 * head_dim + PARTITION + 1 + LANES)
            size = of_rows + PARTITION * head_dim + LANES
            self._scratch = np.empty((threads, size), np.float32)
            self._arguments = (
                self._num_tokens,
                heads,
                kv_heads,
                self._block_size,
                self._blocks.ctypes.data,
                self._length,
                self._window,
                self._begin,
                self._keys.ctypes.data,
                num_keys,
                self._scratch.ctypes.data,
                self._scratch[0].nbytes,
            )
        return self._arguments
