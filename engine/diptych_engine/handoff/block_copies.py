"""Describes the engine's KV memory for the hinge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diptych_kernels.block_copy.copies import BlockCopies, Bus
from diptych_kv_transfer.memory.shard import MemoryKind, MemoryRegion, Shard
from diptych_protocol.config import Staging

Mark = Callable[[], Callable[[], None]]
"""See `Bus.mark`."""


def for_the_hinge(ranks: Sequence[Tensor], staging: Staging) -> tuple[list[Shard], Mark | None]:
    """Return how the hinge accesses each rank's KV memory, [num_blocks, ...], and how its copies
    are informed of steps, if necessary.

    In host memory it reads and writes blocks in place, unless it is configured not to. On a device
    there are only copies, because UCX would have to be built for that device.
    """
    if staging == "always" or any(blocks.device.type != "cpu" for blocks in ranks):
        bus = Bus(ranks[0].device)
        return [_copied(blocks, bus) for blocks in ranks], bus.mark
    return [Shard.of(blocks.flatten(1).view(torch.uint8).numpy()) for blocks in ranks], None


def _copied(blocks: Tensor, bus: Bus) -> Shard:
    copies = BlockCopies(blocks, bus)
    region = MemoryRegion(
        blocks.data_ptr(), blocks.nbytes, MemoryKind.DEVICE, str(blocks.device), blocks
    )
    return Shard(region, copies.block_bytes, copies)
