"""One rank's KV memory, and how its blocks are copied where this process cannot address them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.memory.region import MemoryRegion


class DeviceCopies(Protocol):
    """Copies one rank's blocks to the host and back.

    The hinge's thread calls it. Each copy waits for the work that the engine gave the device
    before, and is complete when the call returns.
    """

    def host_room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that both the copies and the transport reach quickly. Nobody else uses
        it while the array exists."""

    def gather(
        self, block_ids: Sequence[int], room: NDArray[np.uint8], index: int = 0, count: int = 1
    ) -> None:
        """Copy block block_ids[i] to place i of the room, which has as many places as there are
        ids. Only part `index` of `count` equal parts of each block is copied."""

    def scatter(
        self, room: NDArray[np.uint8], block_ids: Sequence[int], index: int = 0, count: int = 1
    ) -> None:
        """Copy place i of the room to block block_ids[i], or to a part of it. No id occurs
        twice."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the equal parts into which each block is cut, such as the KV of some of its heads."""

    index: int = 0
    count: int = 1


WHOLE = Part()
"""All of each block."""


class Shard(msgspec.Struct, frozen=True):
    """One rank's KV memory: blocks of one size, one after the other."""

    region: MemoryRegion
    block_bytes: int
    copies: DeviceCopies | None = None
    """Copies blocks to the host and back. None: a transport can access them in place."""

    @classmethod
    def of(cls, blocks: NDArray[np.uint8]) -> Shard:
        """Make a shard of blocks in host memory, [num_blocks, block_bytes], contiguous."""
        return cls(MemoryRegion.of(blocks), blocks.shape[1])

    def run(self, blocks: range) -> MemoryRegion:
        """Return the memory of consecutive blocks. Raises `ValueError` without such blocks."""
        return self.region.part(blocks.start * self.block_bytes, len(blocks) * self.block_bytes)

    def cut(self, block: int, part: Part) -> MemoryRegion:
        """Return the memory of a part of a block. Raises `ValueError` without such a block."""
        size, rest = divmod(self.block_bytes, part.count)
        if rest or not 0 <= part.index < part.count:
            raise ValueError(f"blocks of {self.block_bytes} bytes have no {part}")
        return self.run(range(block, block + 1)).part(part.index * size, size)

    def array(self) -> NDArray[np.uint8]:
        """Return the blocks as [num_blocks, block_bytes]. Raises `ValueError` unless they are in
        host memory."""
        return self.region.array().reshape(-1, self.block_bytes)
