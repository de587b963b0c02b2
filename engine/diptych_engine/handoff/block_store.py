"""A tier below the block pool: what it remembers is written to disk, and prefixes that it has
forgotten are read from there, both by threads, beside steps.

A block is held while it is being written, as if it were lent. A request whose prefix is on disk
waits for it as for another engine's: `StoredPrefix` is its source. What cannot be read, or not in
time, is computed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych_engine.handoff.block_files import BlockFiles
from diptych_engine.scheduling.request import LoadOrder, Request, StoredPrefix
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_protocol import SchedulerStats

log = logging.getLogger(__name__)

MAX_BLOCKS_IN_WRITING: Final = 64
MAX_SHARE_IN_WRITING: Final = 8
"""At most this part of the pool, an eighth, is held to be written."""
READERS: Final = 2
READ_TIMEOUT_S: Final = 5.0
"""A prefix that has not been read by then is computed."""


class Written(NamedTuple):
    block: int
    name: str
    size: int
    """0: the disk did not take it."""


class Read(NamedTuple):
    request_id: str
    first_token: int
    names: list[str]
    num_whole: int
    """How many of these blocks, from the first on, are in memory now."""


class Late(NamedTuple):
    request_id: str


class Used(NamedTuple):
    """A prefix was used."""

    hashes: list[bytes]


class _Reading(NamedTuple):
    timer: Timer
    since: float
    """By `time.monotonic`."""


class BlockStore:
    """The tier of one engine core, whose thread calls everything public."""

    def __init__(
        self, files: BlockFiles, memory: Sequence[NDArray[np.uint8]], scheduler: Scheduler
    ) -> None:
        """Begin to keep what the scheduler's pool remembers.

        memory: the KV of each rank, [num_blocks, block bytes], in host memory.
        """
        self._files, self._memory, self._scheduler = files, memory, scheduler
        self._pool, self._size = scheduler.pool, scheduler.prefixes.block_size
        self._unsaved: deque[tuple[int, bytes] | list[bytes]] | None
        self._unsaved = deque(maxlen=self._pool.num_blocks)
        """None: nothing is kept or read any more."""
        self._pool.unsaved = self._unsaved
        for block_hash in files.hashes():
            self._pool.kept_elsewhere(block_hash, kept=True)
        self._most = max(
            1, min(MAX_BLOCKS_IN_WRITING, self._pool.num_blocks // MAX_SHARE_IN_WRITING)
        )
        self._in_writing: set[str] = set()
        self._outdated: set[str] = set()
        """Those in writing that nobody may read afterwards."""
        self._reads: dict[str, _Reading] = {}
        """By request."""
        self._late: set[str] = set()
        """Reads that hang. Until they end, no other begins."""
        self._writer = ThreadPoolExecutor(1, "kv-writer")
        self._readers = ThreadPoolExecutor(READERS, "kv-reader")
        self._ended: deque[Written | Read | Late | Used] = deque()
        self._num_written = self._num_damaged = self._num_reads = self._num_read = 0
        self._seconds_reading = 0.0
        self._disk_works = True
        """As far as the writer knows."""
        self.wake_fd: Final = os.eventfd(0, os.EFD_NONBLOCK)
        """Readable when `handle_events` has something to do."""

    @property
    def block_bytes(self) -> int:
        """The KV of one block, in all ranks."""
        return sum(map(len, self._parts(0)))

    @property
    def at_rest(self) -> bool:
        """Whether no thread touches the KV memory."""
        return not (self._in_writing or self._reads)

    # --- reading ------------------------------------------------------------------------------

    def offer(self, request: Request) -> None:
        """Make the disk the source of a new request's prefix, if it has more of it than the engine
        that a router has named."""
        handed_over = request.fetches and request.prefix_source is None
        if self._unsaved is None or self._late or handed_over or request.leaves_disk:
            return
        hashes = self._scheduler.prefixes.lookup_hashes(request)
        count = here = len(self._pool.match(hashes))
        for block_hash in hashes[here:]:
            if self._files.name(block_hash) not in self._files:
                break
            count += 1
        if count == here:
            return
        known = request.num_remote_tokens if request.prefix_source is not None else 0
        if count * self._size > known:
            request.prefix_source = StoredPrefix(remote_num_tokens=count * self._size)

    def read(self, order: LoadOrder) -> None:
        """Begin to fill the blocks of a request."""
        names = [self._files.name((order.names or [])[index]) for index in order.indices]
        timer = Timer(READ_TIMEOUT_S, self._tell, [Late(order.request_id)])
        timer.daemon = True
        self._reads[order.request_id] = _Reading(timer, time.monotonic())
        timer.start()
        self._readers.submit(self._read, order, names)

    def _read(self, order: LoadOrder, names: list[str]) -> None:
        count = 0
        try:
            for name, block in zip(names, order.local_block_ids, strict=True):
                if not self._files.read(name, self._parts(block)):
                    break
                count += 1
        finally:  # the request waits for it, whatever goes wrong
            self._tell(Read(order.request_id, order.num_here, names, count))

    # --- writing ------------------------------------------------------------------------------

    def save(self) -> None:
        """Begin to write blocks that the pool has come to remember."""
        batch: list[tuple[int, str]] = []
        used: list[Used] = []
        while self._unsaved and len(self._in_writing) < self._most:
            newest = self._unsaved.popleft()
            if isinstance(newest, list):
                used.append(Used(newest))
                continue
            block, block_hash = newest
            name = self._files.name(block_hash)
            forgotten = self._pool.match([block_hash]) != [block]
            if forgotten or name in self._files or name in self._in_writing:
                continue
            self._pool.take([block])
            self._in_writing.add(name)
            batch.append((block, name))
        if batch:
            self._writer.submit(self._write, batch)
        for prefix in used:  # when all of it is written
            self._writer.submit(self._tell, prefix)

    def _write(self, batch: list[tuple[int, str]]) -> None:
        works = True
        for block, name in batch:
            size = 0
            try:
                if works:
                    size = self._files.write(name, self._parts(block))
                    self._disk_works = True
            except OSError as exc:  # the next batch tries again
                if self._disk_works:  # else it was said
                    log.warning("KV blocks cannot be kept on disk: %s", exc)
                works = self._disk_works = False
            finally:  # the block is held until then
                self._tell(Written(block, name, size))

    def _parts(self, block: int) -> list[memoryview]:
        return [rank[block].data for rank in self._memory]

    # --- what the threads have done -----------------------------------------------------------

    def handle_events(self) -> None:
        """Apply what the threads have done; call when `wake_fd` is readable."""
        os.eventfd_read(self.wake_fd)
        while self._ended:
            event = self._ended.popleft()
            match event:
                case Written():
                    self._written(event)
                case Read():
                    self._was_read(event)
                case Late(request_id):
                    self._is_late(request_id)
                case Used():
                    self._was_used(event)
        self.save()

    def _tell(self, event: Written | Read | Late | Used) -> None:
        self._ended.append(event)
        os.eventfd_write(self.wake_fd, 1)

    def _written(self, event: Written) -> None:
        self._in_writing.remove(event.name)
        self._pool.release([event.block])
        if event.name in self._outdated:
            self._outdated.remove(event.name)
            self._remove([event.name])
        elif event.size:
            self._num_written += 1
            oldest = self._files.add(event.name, event.size)
            self._tell_pool([event.name], kept=self._unsaved is not None)
            self._remove(oldest)

    def _was_read(self, event: Read) -> None:
        timer, since = self._reads.pop(event.request_id)
        timer.cancel()
        if event.num_whole:
            self._num_reads += 1
            self._num_read += event.num_whole
            self._seconds_reading += time.monotonic() - since
        self._late.discard(event.request_id)
        self._files.use(event.names[: event.num_whole])
        for name in event.names[event.num_whole : event.num_whole + 1]:
            if name in self._files:
                self._num_damaged += 1
                self._files.drop(name)
                self._remove([name])
        end = event.first_token + event.num_whole * self._size
        self._scheduler.load_ended(event.request_id, ok=event.num_whole > 0, num_tokens=end)

    def _was_used(self, event: Used) -> None:
        self._files.use(map(self._files.name, event.hashes))

    def _is_late(self, request_id: str) -> None:
        if request_id in self._reads:  # it has not ended meanwhile
            self._late.add(request_id)
            log.warning("no KV block was read within %g s: the disk hangs", READ_TIMEOUT_S)
            self._scheduler.go_on_without(request_id)

    def _remove(self, names: list[str]) -> None:
        if names:
            self._tell_pool(names, kept=False)
            self._writer.submit(self._files.remove, names)

    def _tell_pool(self, names: Iterable[str], *, kept: bool) -> None:
        for name in names:
            block_hash = self._files.hash_of(name)
            if block_hash is not None:
                self._pool.kept_elsewhere(block_hash, kept=kept)

    # --- the end ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove what has been written, and keep what is computed from now on."""
        self._outdated |= self._in_writing
        self._remove(self._files.clear())

    def retire(self) -> None:
        """Keep and read nothing more: the engine's weights may no longer be those of its files.
        What there is, the next start may use."""
        self._pool.unsaved = self._unsaved = None
        for block_hash in self._files.hashes():
            self._pool.kept_elsewhere(block_hash, kept=False)

    def close(self) -> None:
        """Wait for what is being written, and leave the files to the next engine."""
        self.retire()
        for reading in self._reads.values():  # nobody hears them any more
            reading.timer.cancel()
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        for event in self._ended:
            if isinstance(event, Used):
                self._was_used(event)
        self._files.close()
        os.close(self.wake_fd)

    def count(self, stats: SchedulerStats) -> None:
        """Write totals and what is there into statistics."""
        stats.disk_blocks = len(self._files)
        stats.disk_blocks_written, stats.disk_blocks_damaged = self._num_written, self._num_damaged
        stats.disk_reads, stats.disk_blocks_read = self._num_reads, self._num_read
        stats.seconds_reading_disk = self._seconds_reading
