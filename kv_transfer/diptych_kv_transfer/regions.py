"""The memory that the hinge reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.transport import Buffer


class Regions:
    """The KV memory of one engine, all its ranks."""

    def __init__(self, shards: Sequence[NDArray[np.uint8]]) -> None:
        """`shards`: [num_blocks, bytes of its part of a block] by rank, contiguous."""
        self._shards = shards
        self.block_bytes = sum(shard.shape[1] for shard in shards)
        """Of one block, all ranks."""

    @property
    def num_ranks(self) -> int:
        return len(self._shards)

    def buffers(self, runs: Sequence[range]) -> list[Buffer]:
        """The bytes of runs of blocks: of each run every rank's."""
        return [shard[run.start : run.stop].reshape(-1) for run in runs for shard in self._shards]
