"""KV blocks that outlive the core that computed them.

With `kv_keep` a core's KV memory is files in a folder in memory, one for each rank. Beside them
lies a table of seals, with a record for each block:

    order           when the block was last used; 0: nothing is sealed
    hash, group     the tokens and the group of layers whose KV it contains
    checksum        of hash, group, and the block's bytes in each rank

A block is sealed when the pool has come to remember it, and its record is emptied when the pool
forgets it, before anything is written to it. The next core of the same recipe remembers the blocks
whose checksums are right: those that streams used at once, and most others beside its steps. It
computes the rest. Blocks that are not full yet have a table of their own (`PartFilledBlocks`), and
so have leases (`KeptLeases`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_engine.execution.kv_memory import reserve
from diptych_engine.handoff.block_files import take_folder
from diptych_engine.handoff.kept_leases import Found, KeptLeases
from diptych_engine.handoff.part_filled_blocks import PartFilledBlocks, record_of
from diptych_engine.scheduling.block_pool import BlockPool, Name
from diptych_engine.scheduling.request import Request
from diptych_frontend.processors import usable_processors
from diptych_kernels.made_once import clear, is_private, try_lock
from diptych_kv_transfer import LeftLease
from diptych_protocol import KVTransferParams

RECORD: Final = struct.Struct("<Q16sII")
ORDER: Final = struct.Struct("<Q")
PREFIX: Final = struct.Struct("<16sI")
HELD: Final = 1 << 63
"""The bit of an order that a request which runs uses the block. What was remembered last is then
forgotten first, the tail of a prompt, as a pool does."""
BYTES_AT_ONCE: Final = 16 << 20
"""What is sealed, or looked at, between two steps. It takes 3 to 6 ms, for which messages wait."""


class KeptFiles:
    """The files of one core, in a folder that no other core has locked."""

    def __init__(self, parent: Path, ranks: int) -> None:
        """Raises `OSError` if there can be no folder, or others may write to it."""
        own = parent / f"diptych-{os.geteuid()}"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(own.lstat()):
            raise PermissionError(f"others may write to {own}")
        self.folder, self._lock = take_folder(own)
        self.memory_fds = [self._memory_of(rank) for rank in range(ranks)]
        self.leases = self.folder / "leases"
        if self.leases.is_symlink() or not self.leases.is_dir():
            clear(self.leases)
        self.leases.mkdir(mode=0o700, exist_ok=True)

    def _memory_of(self, rank: int) -> int:
        path = self.folder / f"memory-{rank}"
        memory = _opened(path)
        # The last core's other ranks end after it, and may be in a step.
        if rank and not try_lock(memory):
            os.close(memory)
            path.unlink()
            memory = _opened(path)
            try_lock(memory)
        return memory

    def table(self, name: str, num_bytes: int) -> mmap.mmap:
        """Return a file's bytes, which are 0 in a new one. Raises `InvalidRequestError` if there is
        no room."""
        table = _opened(self.folder / name)
        try:
            os.ftruncate(table, num_bytes)
            reserve(table, num_bytes)
            return mmap.mmap(table, num_bytes)
        finally:
            os.close(table)

    def remove(self) -> None:
        """Remove the files. Their memory is free when this process has ended."""
        for path in self.folder.iterdir():
            clear(path)

    def close(self) -> None:
        """Leave the folder to the next core."""
        for descriptor in (*self.memory_fds, self._lock):
            os.close(descriptor)


class KeptBlocks:
    """The seals of one core, whose thread calls everything."""

    def __init__(
        self,
        files: KeptFiles,
        memory: Sequence[NDArray[np.uint8]],
        pool: BlockPool,
        recipe: bytes,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Have a new pool remember what the last core has left, and seal what it comes to remember.

        memory: the KV of each rank, [>= num_blocks, block bytes], in the files. recipe: names
        everything besides tokens that KV depends on. rows: how many parts a block has, and how many
        tokens each (see `PartFilledBlocks`); None: only full blocks are kept. Raises
        `InvalidRequestError` if there is no room.
        """
        self._files, self._memory, self._pool = files, memory, pool
        self._table = files.table("seals", RECORD.size * (1 + pool.num_blocks))
        self._part_filled: PartFilledBlocks | None = None
        if rows is not None:
            table = files.table("part-filled", record_of(rows[1]).size * pool.num_blocks)
            self._part_filled = PartFilledBlocks(table, memory, *rows)
        self._at_once = max(1, BYTES_AT_ONCE // sum(blocks.shape[1] for blocks in memory))
        self._unsealed: dict[int, tuple[Name, int]] = {}
        """Blocks to be sealed, with what their records will say."""
        geometry = repr([blocks.shape for blocks in memory]).encode()
        self._fingerprint = hashlib.sha256(recipe + geometry).digest()
        self.leases = KeptLeases(files.leases)
        self.left: list[LeftLease] = []
        """Open leases that the last core has left, all of whose blocks are right. Nobody may have a
        block of this pool before whoever builds the core holds them."""
        self.adopted: dict[int, Found] = {}
        """Blocks that the last core has left, and that are right."""
        self.unseen: dict[int, Found] = {}
        """Blocks that it has left, and that nobody has looked at or used yet."""
        left: list[int] = []
        if self._table[: RECORD.size] == self._fingerprint:
            left = self._adopt()
        else:
            self._table[: RECORD.size] = bytes(RECORD.size)
            self.leases.clear()
            if self._part_filled is not None:
                self._part_filled.clear()
        self._write_anew(left)
        pool.seals = self
        self.wake_fd: Final = os.eventfd(bool(self.unseen), os.EFD_NONBLOCK)
        """Readable when `seal` has more to do."""

    def _adopt(self) -> list[int]:
        """Returns what the last core has left, the first to be forgotten first."""
        sealed: list[tuple[int, int, Found]] = []
        for block in range(self._pool.num_blocks):
            order, *found = RECORD.unpack_from(self._table, _place(block))
            if order:
                last = order if order < HELD else HELD + (2 * HELD - order)
                sealed.append((last, block, (found[0], found[1], found[2])))
        sealed.sort()
        held: dict[int, Found] = {}
        for last, block, about in sealed:
            self._pool.put_last(block)
            (self.unseen if last < HELD else held)[block] = about
        with ThreadPoolExecutor(math.ceil(usable_processors())) as threads:
            answers = list(threads.map(self._is_right, held, held.values()))
        for (block, about), right in zip(held.items(), answers, strict=True):
            self._judge(block, about, right=right)
        self._look()
        self.left = self.leases.take(self._pool.num_blocks, self._is_right)
        lent = {block for lease in self.left for block in lease.block_ids}
        for block in lent & self.unseen.keys():  # the last core was killed before it held them
            seal = self.unseen.pop(block)
            self._judge(block, seal, right=self._is_right(block, seal))
        if self._part_filled is not None:
            self._part_filled.adopt(self._pool, others={*self.unseen, *self.adopted, *lent})
        return [block for _, block, _ in sealed]

    def _look(self) -> None:
        for _ in range(min(self._at_once, len(self.unseen))):
            block, found = self.unseen.popitem()
            self._judge(block, found, right=self._is_right(block, found))

    def _is_right(self, block: int, found: Found) -> bool:
        block_hash, group, checksum = found
        known = self.adopted.get(block) == found
        return known or self._checksum(block, block_hash, group) == checksum

    def _seal_of(self, block: int, other: Found) -> Found:
        """Return a block's seal; if it has none, the other one, with a checksum."""
        order, *found = RECORD.unpack_from(self._table, _place(block))
        block_hash, group, checksum = found if order else other
        return block_hash, group, checksum if order else self._checksum(block, block_hash, group)

    def _judge(self, block: int, found: Found, *, right: bool) -> None:
        block_hash, group, _ = found
        if right and self._pool.adopt(block, (block_hash, group) if group else block_hash):
            self.adopted[block] = found
        else:
            ORDER.pack_into(self._table, _place(block), 0)

    def _write_anew(self, left: Sequence[int]) -> None:
        """Have the table say what this core's pool remembers, or may come to: only what it has
        adopted, or not seen yet. One that is killed meanwhile leaves what it found."""
        mine = {*self.unseen, *self.adopted}
        kept = {block: order for order, block in enumerate(left, 1) if block in mine}
        for block in range(self._pool.num_blocks):
            ORDER.pack_into(self._table, _place(block), kept.get(block, 0))
        self._clock = len(left)
        self._table[: RECORD.size] = self._fingerprint

    # --- what the pool says, between steps ----------------------------------------------------

    def remembered(self, block: int, name: Name) -> None:
        """See `Seals.remembered`."""
        self._clock += 1
        self._unsealed[block] = name, self._clock | HELD
        if self._part_filled is not None:
            self._part_filled.forgotten(block)

    def forgotten(self, block: int) -> None:
        """See `Seals.forgotten`."""
        self._unsealed.pop(block, None)
        self.unseen.pop(block, None)
        ORDER.pack_into(self._table, _place(block), 0)
        if self._part_filled is not None:
            self._part_filled.forgotten(block)

    def used(self, block: int, *, held: bool) -> None:
        """See `Seals.used`."""
        self._clock += 1
        order = self._clock | HELD if held else self._clock
        if block in self._unsealed:
            self._unsealed[block] = self._unsealed[block][0], order
        else:
            ORDER.pack_into(self._table, _place(block), order)

    def seal(self, running: Iterable[Request] = ()) -> None:
        """Seal what the pool has come to remember, and what these requests have begun, then look at
        what the last core has left, the newest first; call after a step, and when `wake_fd` is
        readable."""
        if self._part_filled is not None:
            self._part_filled.seal(running)
        for block in list(self._unsealed)[: self._at_once]:
            name, order = self._unsealed.pop(block)
            block_hash, group = (name, 0) if isinstance(name, bytes) else name
            checksum = self._checksum(block, block_hash, group)
            RECORD.pack_into(self._table, _place(block), order, block_hash, group, checksum)
        self.leases.write(self._unsealed, self._seal_of)
        if not self._unsealed:
            self._look()
        if self._unsealed or self.unseen:
            os.eventfd_write(self.wake_fd, 1)

    def granted(self, params: KVTransferParams) -> None:
        """Have the next core go on with a lease that was granted."""
        self.leases.granted(params)
        os.eventfd_write(self.wake_fd, 1)  # there may be no step for long

    def seal_more(self) -> None:
        """Call when `wake_fd` is readable."""
        os.eventfd_read(self.wake_fd)
        self.seal()

    def _checksum(self, block: int, block_hash: bytes, group: int) -> int:
        checksum = zlib.crc32(PREFIX.pack(block_hash, group))
        for rank in self._memory:
            checksum = zlib.crc32(rank[block], checksum)
        return checksum

    # --- the end ------------------------------------------------------------------------------

    def retire(self) -> None:
        """Leave nothing to the next core, whose weights may be others than this one's are now."""
        self._pool.seals = None
        self._unsealed.clear()
        self.unseen.clear()
        self._table[: RECORD.size] = bytes(RECORD.size)

    def close(self, *, failed: bool) -> None:
        """failed: the next core shall find the blocks. Otherwise no memory is left in use."""
        self._pool.seals = None
        if not failed:
            self._files.remove()
        self._files.close()
        os.close(self.wake_fd)


def _opened(path: Path) -> int:
    """What is no file in its place, a folder or a FIFO, makes way for one. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            clear(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _place(block: int) -> int:
    return RECORD.size * (1 + block)
