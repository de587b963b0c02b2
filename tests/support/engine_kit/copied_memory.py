"""KV memory that a hinge reaches only by copies, as it does a GPU's. Without torch.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.memory.region import MemoryKind, MemoryRegion
from diptych_kv_transfer.memory.shard import Shard


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

    def host_room(self, num_bytes: int) -> MemoryRegion:
        return MemoryRegion.of(np.full(num_bytes, 251, np.uint8))

    def gather(self, block_ids: Sequence[int], room: MemoryRegion) -> None:
        _places(room, block_ids)[:] = self.blocks[list(block_ids)]

    def scatter(self, room: MemoryRegion, block_ids: Sequence[int]) -> None:
        assert len(set(block_ids)) == len(block_ids)
        self.blocks[list(block_ids)] = _places(room, block_ids)


def _places(room: MemoryRegion, block_ids: Sequence[int]) -> NDArray[np.uint8]:
    return room.array().reshape(len(block_ids), -1)
