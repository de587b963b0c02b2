"""The memory that the hinge reads and writes: our KV, and room for KV that has to be staged."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import numpy as np

from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.repack import Shards, repack
from diptych_kv_transfer.memory.shard import WHOLE, MemoryKind, MemoryRegion, Part, Shard
from diptych_kv_transfer.memory.staging import AnyStaging, StagedCopies, Staging


class Regions:
    """All the memory of one engine that takes part in transfers. Only `staged_bytes` may be used
    from several threads.

    The transport reads and writes blocks in place if it reaches that memory. Other blocks are
    copied to the host to be sent, and received ones are staged until they are valid.
    """

    def __init__(
        self, shards: Shards, layout: Layout | None, reaches: Collection[MemoryKind]
    ) -> None:
        """
        Args:
            shards: by rank; either none has copies, or all have.
            layout: the layout of these blocks; None: nothing can be repacked into them.
            reaches: the kinds of memory that the transport can read and write.

        Raises `ValueError` for a layout of other blocks, and for blocks without copies that the
        transport does not reach.
        """
        self._shards = shards
        self._copies = [x.copies for x in shards if x.copies is not None]
        found = [shard.block_bytes for shard in shards]
        if layout is not None and found != [layout.block_bytes] * layout.num_ranks:
            raise ValueError(f"blocks of {found} bytes by rank are not those of {layout}")
        for shard in shards:
            if shard.copies is None and shard.region.kind not in reaches:
                raise ValueError(f"the transport does not reach memory of {shard.region.device}")
        if self._copies and len(self._copies) != len(shards):
            raise ValueError("either the blocks of all ranks go through copies, or none")
        self._layout = layout
        self._staged: dict[str, tuple[AnyStaging, Shards]] = {}
        self._outgoing: dict[Hashable, Shards] = {}
        """Copies of blocks on a device, by the key of the send."""
        self.block_bytes = sum(found)
        """Size, in bytes, of one block, over all ranks."""

    @property
    def on_device(self) -> bool:
        """Whether all blocks are copied through the host."""
        return bool(self._copies)

    def outgoing(
        self, key: Hashable, runs: Sequence[range], part: Part = WHOLE
    ) -> list[MemoryRegion]:
        """Return the bytes of runs of our blocks: for each run, those of every rank. They are kept
        until `sent` is called with this key.

        part: which part of each block. The regions of a part are those of single blocks. Raises
        `ValueError` for a part that our blocks do not have.
        """
        if not self._copies:
            return _cut(self._shards, runs, part)
        block_ids = [block for run in runs for block in run]
        rooms = self._rooms(len(block_ids), part)
        for copies, room in zip(self._copies, rooms, strict=True):
            copies.gather(block_ids, room.region.array(), part.index, part.count)
        self._outgoing[key] = rooms
        places, first = [], 0
        for run in runs:
            places.append(range(first, first + len(run)))
            first += len(run)
        return _cut(rooms, places, WHOLE)

    def sent(self, key: Hashable) -> None:
        """Free what was copied for a send, because it has ended."""
        self._outgoing.pop(key, None)

    def incoming(
        self, runs: Sequence[range], staged_for: str | None = None, part: Part = WHOLE
    ) -> list[MemoryRegion]:
        """Return where runs of blocks, or parts of blocks, are to be written: in our own memory, or
        in a request's staging area."""
        if staged_for is None:
            return _cut(self._shards, runs, part)
        return _cut(self._staged[staged_for][1], runs, WHOLE)

    def stage(self, request_id: str, staging: AnyStaging) -> None:
        """Make room for the blocks of a request. A request that already has room keeps it, because
        a second call announces fewer blocks."""
        if request_id in self._staged:
            shards = self._staged[request_id][1]
        elif isinstance(staging, StagedCopies):
            shards = self._rooms(staging.num_blocks, staging.part)
        else:
            layout = staging.layout
            shards = [
                self._room(staging.num_blocks, layout.block_bytes) for _ in range(layout.num_ranks)
            ]
        self._staged[request_id] = staging, shards

    def unpack(self, request_id: str) -> None:
        """Copy the staged blocks of a request to where they belong."""
        staging, shards = self._staged[request_id]
        if isinstance(staging, StagedCopies):
            self._scatter(shards, staging.local_block_ids, staging.part)
            return
        layout, block_ids = self._layout, staging.local_block_ids
        if layout is None:
            raise RuntimeError("blocks of another geometry, and no layout of our own")
        if not self._copies:
            _repack(staging, shards, self._shards, layout, block_ids)
            return
        packed = self._rooms(len(block_ids), WHOLE)
        _repack(staging, shards, packed, layout, range(len(block_ids)))
        self._scatter(packed, block_ids, WHOLE)

    def _scatter(self, rooms: Shards, block_ids: Sequence[int], part: Part) -> None:
        """Copy the first blocks, or parts of blocks, of rooms to our blocks."""
        for copies, room in zip(self._copies, rooms, strict=True):
            filled = room.run(range(len(block_ids))).array()
            copies.scatter(filled, block_ids, part.index, part.count)

    @property
    def staged_bytes(self) -> int:
        """The number of staged bytes, in both directions. Safe to read from another thread."""
        incoming = sum(staging.num_bytes for staging, _ in list(self._staged.values()))
        outgoing = [x.region.length for shards in list(self._outgoing.values()) for x in shards]
        return incoming + sum(outgoing)

    def drop(self, request_id: str) -> None:
        """Free a request's staging area, if it has one."""
        self._staged.pop(request_id, None)

    def _rooms(self, num_blocks: int, part: Part) -> list[Shard]:
        """Room on the host for so many blocks, or parts of blocks, of every rank of ours.

        Raises `ValueError` for a part that our blocks do not have.
        """
        if any(shard.block_bytes % part.count for shard in self._shards):
            raise ValueError(f"blocks of {self.block_bytes} bytes have no {part}")
        return [self._room(num_blocks, shard.block_bytes // part.count) for shard in self._shards]

    def _room(self, num_blocks: int, block_bytes: int) -> Shard:
        size = num_blocks * block_bytes
        room = self._copies[0].host_room(size) if self._copies else np.empty(size, np.uint8)
        return Shard(MemoryRegion.of(room), block_bytes)


def _cut(shards: Shards, runs: Sequence[range], part: Part) -> list[MemoryRegion]:
    if part == WHOLE:
        return [shard.run(run) for run in runs for shard in shards]
    return [shard.cut(block, part) for run in runs for block in run for shard in shards]


def _repack(
    staging: Staging, source: Shards, target: Shards, layout: Layout, blocks: Sequence[int]
) -> None:
    repack(source, staging.layout, target, layout, blocks, staging.start, staging.end)
