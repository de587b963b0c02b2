"""KV memory that a hinge reaches only by copies, as it does a GPU's. Without torch.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.memory.shard import MemoryKind, MemoryRegion, Shard


class CopiedMemory:
    """`diptych_kv_transfer.memory.shard.DeviceCopies` of an array of the host."""

    def __init__(self, blocks: NDArray[np.uint8]) -> None:
        """blocks: [num_blocks, block_bytes]; what a test looks at."""
        self.blocks = blocks

    @property
    def shard(self) -> Shard:
        host = MemoryRegion.of(self.blocks)
        region = MemoryRegion(host.address, host.length, MemoryKind.DEVICE, "copied", self.blocks)
        return Shard(region, self.blocks.shape[1], self)

    def host_room(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.full(num_bytes, 251, np.uint8)

    def gather(
        self, block_ids: Sequence[int], room: NDArray[np.uint8], index: int = 0, count: int = 1
    ) -> None:
        room.reshape(len(block_ids), -1)[:] = self._parts(count)[list(block_ids), index]

    def scatter(
        self, room: NDArray[np.uint8], block_ids: Sequence[int], index: int = 0, count: int = 1
    ) -> None:
        assert len(set(block_ids)) == len(block_ids)
        self._parts(count)[list(block_ids), index] = room.reshape(len(block_ids), -1)

    def _parts(self, count: int) -> NDArray[np.uint8]:
        return self.blocks.reshape(len(self.blocks), count, -1)
