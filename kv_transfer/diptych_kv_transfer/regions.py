"""The memory that the hinge reads and writes: our KV, and room for KV that has to be staged."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from diptych_kv_transfer.memory.device_memory import DeviceMemory
from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.repack import Shards, repack
from diptych_kv_transfer.memory.staging import Staging
from diptych_kv_transfer.transports.transport import Buffer


class Regions:
    """All the memory of one engine that takes part in transfers. Only `staged_bytes` may be used
    from several threads.

    UCX reads and writes blocks in host memory where they are. Blocks on a device are copied to the
    host before they are sent, and what comes for them is staged until it is valid.
    """

    def __init__(self, memory: Shards | Sequence[DeviceMemory], layout: Layout | None) -> None:
        """
        Args:
            memory: by rank; on the host [num_blocks, bytes of its part of a block], contiguous.
            layout: the layout of these blocks; None: nothing can be repacked into them.

        Raises `ValueError` for a layout of other blocks, and for blocks on a device without one.
        """
        self._shards: Shards = [x for x in memory if isinstance(x, np.ndarray)]
        self._devices = [x for x in memory if not isinstance(x, np.ndarray)]
        found = [shard.shape[1] for shard in self._shards]
        found += [device.block_bytes for device in self._devices]
        if layout is not None and found != [layout.block_bytes] * layout.num_ranks:
            raise ValueError(f"blocks of {found} bytes by rank are not those of {layout}")
        if layout is None and self._devices:
            raise ValueError("blocks on a device are staged, and that needs to know their layout")
        self._layout = layout
        self._staged: dict[str, tuple[Staging, Shards]] = {}
        self._outgoing: dict[Hashable, Shards] = {}
        """Copies of blocks on a device, by the key of the send."""
        self.block_bytes = sum(found)
        """Size, in bytes, of one block, over all ranks."""

    @property
    def on_device(self) -> bool:
        """Everything goes through copies on the host."""
        return bool(self._devices)

    def outgoing(self, key: Hashable, runs: Sequence[range]) -> list[Buffer]:
        """Buffers with the bytes of runs of our blocks: for each run, those of every rank. They are
        kept until `sent` is called with this key."""
        if not self._devices:
            return _cut(self._shards, runs)
        block_ids = [block for run in runs for block in run]
        copies = []
        for device in self._devices:
            room = device.host_room(len(block_ids) * device.block_bytes).reshape(len(block_ids), -1)
            device.gather(block_ids, room)
            copies.append(room)
        self._outgoing[key] = copies
        places, first = [], 0
        for run in runs:
            places.append(range(first, first + len(run)))
            first += len(run)
        return _cut(copies, places)

    def sent(self, key: Hashable) -> None:
        """A send has ended: nobody reads what was copied for it."""
        self._outgoing.pop(key, None)

    def incoming(self, runs: Sequence[range], staged_for: str | None = None) -> list[Buffer]:
        """The buffers that runs of blocks are to be written to: in our own memory, or in a
        request's staging area."""
        return _cut(self._shards if staged_for is None else self._staged[staged_for][1], runs)

    def stage(self, request_id: str, staging: Staging) -> None:
        """Make room for what comes for a request."""
        layout = staging.layout
        shards = [self._room(staging.num_blocks, layout) for _ in range(layout.num_ranks)]
        self._staged[request_id] = staging, shards

    def unpack(self, request_id: str) -> None:
        """Copy what was staged for a request to where it belongs."""
        staging, shards = self._staged[request_id]
        layout, block_ids = self._layout, staging.local_block_ids
        if layout is None:
            raise RuntimeError("blocks of another geometry, and no layout of our own")
        if not self._devices:
            _repack(staging, shards, self._shards, layout, block_ids)
            return
        if staging.layout != layout:
            packed = [self._room(len(block_ids), layout) for _ in self._devices]
            _repack(staging, shards, packed, layout, range(len(block_ids)))
            shards = packed
        for device, shard in zip(self._devices, shards, strict=True):
            device.scatter(shard, block_ids)

    @property
    def staged_bytes(self) -> int:
        """How many bytes are staged, in both directions. Safe to ask from another thread."""
        incoming = sum(staging.num_bytes for staging, _ in list(self._staged.values()))
        return incoming + sum(x.nbytes for shards in list(self._outgoing.values()) for x in shards)

    def drop(self, request_id: str) -> int:
        """Free a request's staging area, if it has one. Returns its size in bytes."""
        staged = self._staged.pop(request_id, None)
        return 0 if staged is None else staged[0].num_bytes

    def _room(self, num_blocks: int, layout: Layout) -> Buffer:
        num_bytes = num_blocks * layout.block_bytes
        if self._devices:
            room = self._devices[0].host_room(num_bytes)
        else:
            room = np.empty(num_bytes, np.uint8)
        return room.reshape(num_blocks, -1)


def _cut(shards: Shards, runs: Sequence[range]) -> list[Buffer]:
    return [shard[run.start : run.stop].reshape(-1) for run in runs for shard in shards]


def _repack(
    staging: Staging, source: Shards, target: Shards, layout: Layout, blocks: Sequence[int]
) -> None:
    repack(source, staging.layout, target, layout, blocks, staging.start, staging.end)
