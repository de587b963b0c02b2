"""The blocks that running requests are filling, which outlive their core as full ones do.

A table has a record for each block of the pool; one with the count 0 is empty:

    hash        of the full block before it
    count       of its first tokens, whose KV is computed
    checksum    of hash, count, these tokens, and their KV in each rank
    tokens

A record is written after each step that computes more of its block. A checksum goes on from that
of the step before, so each token's KV is read once. One that was torn has no right checksum.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Container, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import Request

COUNT: Final = 16
"""Where a record has its count."""


def record_of(block_size: int) -> struct.Struct:
    """Return the form of a record."""
    return struct.Struct(f"<16sII{block_size}I")


class PartFilledBlocks:
    """The records of one core, whose thread calls everything."""

    def __init__(
        self, table: mmap.mmap, memory: Sequence[NDArray[np.uint8]], parts: int, block_size: int
    ) -> None:
        """table: has a record's bytes for each block. memory: the KV of each rank, [>= num_blocks,
        block bytes]. parts: of how many layers a block has keys or values, one after the other,
        each with a row for each token."""
        rows = [blocks.reshape(len(blocks), parts, block_size, -1) for blocks in memory]
        self._rows = [blocks.swapaxes(1, 2) for blocks in rows]
        """The KV of each rank, [>= num_blocks, block_size, parts, bytes]."""
        self._table, self._record = table, record_of(block_size)
        self._block_size = block_size
        self._sums: dict[int, tuple[int, int]] = {}
        """How many tokens of a block this core has recorded, and the checksum of their KV alone."""

    def adopt(self, pool: BlockPool, others: Container[int]) -> None:
        """Have a new pool find what the last core has left in blocks that are no `others`, which
        are full, or lent."""
        records = np.frombuffer(self._table, np.uint8).reshape(-1, self._record.size)
        counts = records[:, COUNT : COUNT + 4].copy().view("<u4")
        for block in map(int, np.flatnonzero(counts)):
            if block in others or not self._adopt_one(pool, block):
                self.forgotten(block)

    def _adopt_one(self, pool: BlockPool, block: int) -> bool:
        place = block * self._record.size
        parent, count, checksum, *token_ids = self._record.unpack_from(self._table, place)
        if count >= self._block_size:
            return False
        del token_ids[count:]
        if self._checksum(parent, token_ids, self._add(block, 0, count, 0)) != checksum:
            return False
        for rank in self._rows:  # what the last core was about to write
            rank[block, count:] = 0
        return pool.adopt_part(block, parent, token_ids)

    def clear(self) -> None:
        """Leave no record."""
        self._table[:] = bytes(len(self._table))

    def seal(self, running: Iterable[Request]) -> None:
        """Write what a step has computed of the last block of each request."""
        for request in running:
            full, count = divmod(request.num_computed_tokens, self._block_size)
            if not count or not 0 < full <= len(request.block_hashes) or request.images:
                continue
            block = request.block_ids[full]
            known, checksum = self._sums.get(block, (0, 0))
            if known >= count:
                continue
            checksum = self._add(block, known, count, checksum)
            self._sums[block] = count, checksum
            first = full * self._block_size
            self._write(
                block, request.block_hashes[full - 1], request.token_ids[first : first + count]
            )

    def _write(self, block: int, parent: bytes, token_ids: list[int]) -> None:
        count, of_rows = self._sums[block]
        padded = token_ids + [0] * (self._block_size - count)
        checksum = self._checksum(parent, token_ids, of_rows)
        place = block * self._record.size
        self._record.pack_into(self._table, place, parent, count, checksum, *padded)

    def forgotten(self, block: int) -> None:
        """A block's content may change from now on, or is sealed as a full one."""
        self._sums.pop(block, None)
        place = block * self._record.size
        self._table[place : place + self._record.size] = bytes(self._record.size)

    def _add(self, block: int, first: int, end: int, checksum: int) -> int:
        """Add the KV of some tokens of a block to the checksum of those before them."""
        for row in range(first, end):
            for rank in self._rows:
                checksum = zlib.crc32(rank[block, row].tobytes(), checksum)
        return checksum

    def _checksum(self, parent: bytes, token_ids: Sequence[int], of_rows: int) -> int:
        about = struct.pack(f"<16s{len(token_ids)}I", parent, *token_ids)
        return zlib.crc32(about, of_rows)
