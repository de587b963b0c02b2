"""One rank's KV memory as ranges of bytes that transports read and write, and how its blocks are
copied where this process cannot address them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class MemoryKind(Enum):
    """Who can address the memory."""

    HOST = "host"
    """The processor."""
    DEVICE = "device"
    """An accelerator only, such as a GPU."""


class MemoryRegion(msgspec.Struct, frozen=True):
    """Contiguous bytes. They exist as long as the region does."""

    address: int
    length: int
    """Number of bytes."""
    kind: MemoryKind = MemoryKind.HOST
    device: str = "cpu"
    """The device as torch names it, such as `cuda:0`."""
    owner: object = None
    """The object that owns the memory and has to stay alive."""

    @classmethod
    def of(cls, array: NDArray[np.uint8]) -> MemoryRegion:
        """Return the memory of a contiguous array. Raises `ValueError` for another array."""
        if not array.flags.c_contiguous:
            raise ValueError("an array that is not contiguous is not one region")
        return cls(array.ctypes.data, array.nbytes, owner=array)

    def part(self, start: int, length: int) -> MemoryRegion:
        """Return `length` bytes from `start`. Raises `ValueError` for bytes outside."""
        if not 0 <= start <= start + length <= self.length:
            raise ValueError(f"bytes {start} to {start + length} of {self.length} are outside")
        return MemoryRegion(self.address + start, length, self.kind, self.device, self.owner)

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes as an array [length]. Raises `ValueError` unless the host has them."""
        if self.kind is not MemoryKind.HOST:
            raise ValueError(f"the host cannot address memory of {self.device}")
        return np.asarray(_Interface(self))


class _Interface:
    """A region as NumPy reads it; the array keeps this, and so the region."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self._region.length,),
            "typestr": "|u1",
            "data": (self._region.address, False),
        }


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
