"""Divides a step's decodes into pieces of work for the threads of a CPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PARTITION = 64
"""Keys that are computed together. A sequence's result depends on how its keys are divided, so this
is a constant: neither the batch nor the number of threads may change a result."""


class DecodeBatch:
    """The decodes of a step; one object serves all layers."""

    def __init__(
        self,
        context_lens: NDArray[np.int64],
        block_tables: NDArray[np.int64],
        block_size: int,
        window: int | None,
    ) -> None:
        """context_lens: [decodes]; block_tables: [decodes, blocks]."""
        self._lengths = np.ascontiguousarray(context_lens)
        self._tables = np.ascontiguousarray(block_tables)
        self._block_size = block_size
        self._keys = context_lens if window is None else np.minimum(context_lens, window)
        self._first_keys = self._lengths - self._keys
        self.partitions = np.zeros(len(context_lens) + 1, np.int64)
        """[decodes + 1]: where each one's partitions begin, among all; the last is their number."""
        np.cumsum(-(-self._keys // PARTITION), out=self.partitions[1:])
        self._arguments: tuple[int, ...] = ()
        self._threads = 0

    def arguments(self, heads: int, kv_heads: int, head_dim: int, threads: int) -> tuple[int, ...]:
        """Return the arguments of `DecodeAttention` that are the same for all layers: from the
        ninth on."""
        if threads != self._threads:  # each has memory of its own
            self._threads = threads
            # Of each partition and head: the weighted sum of values, the maximum, the sum.
            self._partials = np.empty((self.partitions[-1], heads, head_dim + 2), np.float32)
            # Of each thread: scores; then the places of a partition's keys, queries, values and
            # weights as bfloat16, or a few keys as float32.
            halves = (heads + PARTITION) * head_dim + PARTITION
            of_thread = heads * PARTITION + 2 * PARTITION + -(-halves // 2)
            self._scratch = np.empty((threads, of_thread), np.float32)
            self._arguments = (
                len(self._lengths),
                heads,
                kv_heads,
                self._block_size,
                self._tables.shape[1],
                *(
                    array.ctypes.data
                    for array in (
                        self._lengths,
                        self._first_keys,
                        self._tables,
                        self.partitions,
                        self._partials,
                        self._scratch,
                    )
                ),
                self._scratch[0].nbytes,
                head_dim,
            )
        return self._arguments
