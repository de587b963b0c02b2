"""The engine's KV memory as a hinge sees it, and the copies that bring a device's to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from diptych_kernels.block_copy import gather_blocks, scatter_blocks
from diptych_kernels.host_arrays import to_device
from diptych_kv_transfer.memory.region import MemoryKind, MemoryRegion
from diptych_kv_transfer.memory.shard import Shard
from diptych_protocol.config import Staging

WINDOW_BYTES = 32 << 20
"""How much device memory blocks on their way take: enough to fill the bus, little for a GPU."""


class BlockCopies:
    """KV memory that is copied block by block: `DeviceCopies` for the hinge.

    Scattered blocks are brought together on the device, and cross the bus as one run. The copies of
    a GPU are on a stream of their own. It waits for what has been launched so far: a prefill may
    still write the blocks that were lent, and a step for nobody into those that were reserved.
    """

    def __init__(self, blocks: Tensor) -> None:
        """blocks: [num_blocks, ...], contiguous, on any device. Compiles what a copy needs."""
        self._blocks = blocks
        self._shape = blocks.shape[1:]
        self.block_bytes = blocks[0].numel() * blocks.itemsize
        self._stream: torch.cuda.Stream | None = None
        if blocks.is_cuda:
            self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            size = min(len(blocks), max(1, WINDOW_BYTES // self.block_bytes))
            self._window = torch.empty((size, *self._shape), dtype=blocks.dtype, device=self.device)
        room = self.host_room(self.block_bytes)
        self.gather([0], room)
        self.scatter(room, [0])

    @property
    def device(self) -> torch.device:
        return self._blocks.device

    @property
    def shard(self) -> Shard:
        """The blocks as the hinge sees them."""
        blocks = self._blocks
        region = MemoryRegion(
            blocks.data_ptr(), blocks.nbytes, MemoryKind.DEVICE, str(self.device), blocks
        )
        return Shard(region, self.block_bytes, self)

    def host_room(self, num_bytes: int) -> MemoryRegion:
        """Memory of the host; for a GPU it is pinned, and torch keeps what is garbage for reuse."""
        on_gpu = self._stream is not None
        room = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        return MemoryRegion.of(room.numpy())

    def gather(self, block_ids: Sequence[int], room: MemoryRegion) -> None:
        """Copy block block_ids[i] to place i of the room."""
        with self._in_turn():
            for ids, host, window in self._parts(block_ids, room):
                gather_blocks(self._blocks, ids, window)
                host.copy_(window, non_blocking=True)

    def scatter(self, room: MemoryRegion, block_ids: Sequence[int]) -> None:
        """Copy place i of the room to block block_ids[i]; no id comes twice."""
        with self._in_turn():
            for ids, host, window in self._parts(block_ids, room):
                window.copy_(host, non_blocking=True)
                scatter_blocks(window, self._blocks, ids)

    def _parts(
        self, block_ids: Sequence[int], room: MemoryRegion
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As much at a time as the window holds: ids, their part of the room, and of the window."""
        host = torch.from_numpy(room.array()).view(self._blocks.dtype).view(-1, *self._shape)
        for first in range(0, len(block_ids), len(self._window)):
            ids = np.array(block_ids[first : first + len(self._window)], np.int64)
            yield (
                to_device(ids, self.device),
                host[first : first + len(ids)],
                self._window[: len(ids)],
            )

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Launch after all that was launched before, and leave when it has been done."""
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.default_stream(self.device))
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()


def for_the_hinge(ranks: Sequence[Tensor], staging: Staging) -> list[Shard]:
    """How the hinge is to reach each rank's KV memory, [num_blocks, ...].

    On the host it reads and writes blocks where they are, unless it is told not to. On a device
    there are only copies: UCX would have to be one that was built for that device.
    """
    if staging == "always" or any(blocks.device.type != "cpu" for blocks in ranks):
        return [BlockCopies(blocks).shard for blocks in ranks]
    return [Shard.of(blocks.flatten(1).view(torch.uint8).numpy()) for blocks in ranks]
