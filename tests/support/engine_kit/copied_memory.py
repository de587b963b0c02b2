"""KV memory that a hinge reaches only by copies, as it does a GPU's. Without torch.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class CopiedMemory:
    """A `diptych_kv_transfer.memory.device_memory.DeviceMemory` in an array of the host."""

    def __init__(self, blocks: NDArray[np.uint8]) -> None:
        """blocks: [num_blocks, block_bytes]; what a test looks at."""
        self.blocks = blocks
        self.block_bytes = blocks.shape[1]

    def host_room(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.full(num_bytes, 251, np.uint8)

    def gather(self, block_ids: Sequence[int], room: NDArray[np.uint8]) -> None:
        room[:] = self.blocks[list(block_ids)]

    def scatter(self, room: NDArray[np.uint8], block_ids: Sequence[int]) -> None:
        assert len(set(block_ids)) == len(block_ids) == len(room)
        self.blocks[list(block_ids)] = room
