"""Copies KV blocks from a device to the host and back, for the hand-off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_kernels.block_copy import gather_blocks, scatter_blocks
from diptych_kernels.host_arrays import to_device

WINDOW_BYTES = 32 << 20
"""Device memory for blocks that are being copied: enough to fill the bus, little for a GPU."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integer dtypes by size in bytes, as which numbers of any dtype are moved."""


class Bus:
    """The bus between one device and the host. One thread at a time copies.

    A GPU's copies are on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._launched: torch.cuda.Event | None = None
        self._complete: torch.cuda.Event | None = None
        with torch.inference_mode():
            self._window = torch.empty(WINDOW_BYTES, dtype=torch.uint8, device=device)
        if self._window.is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launched(self) -> None:
        """Make later copies wait for all that the calling thread has launched so far on its current
        stream. Any thread may call it."""
        self._launched = self._complete = self._event()

    def mark(self) -> Callable[[], None]:
        """Return a function for what the calling thread has launched so far. After its call, copies
        to the host wait only for that, because what they copy is complete by then."""
        event = self._event()

        def complete() -> None:
            self._complete = event

        return complete

    def _event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def in_turn(self, *, to_host: bool) -> Iterator[None]:
        """Run the block's launches after those before it, and wait for them at the end.

        Those before it are given by `launched` or, for copies to the host, by `mark`. Without
        either they are all that is on the device's default stream now.
        """
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            event = self._complete if to_host else self._launched
            if event is None:
                self._stream.wait_stream(torch.cuda.default_stream(self.device))
            else:
                self._stream.wait_event(event)
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()

    def window(self, rows: int, like: Tensor) -> Tensor:
        """Return device memory for this many rows of a tensor [any, row]."""
        size = rows * like.shape[1] * like.itemsize
        if size > len(self._window):  # a single row may be larger
            self._window = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._window[:size].view(like.dtype).view(rows, like.shape[1])

    def host_room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory. For a GPU it is pinned, and torch reuses it after
        garbage collection."""
        if self._stream is None:
            return torch.empty(num_bytes, dtype=torch.uint8).numpy()
        with torch.cuda.stream(self._stream):  # on its device: a thread's own is the first one
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()


class BlockCopies:
    """KV memory that is copied block by block.

    Scattered blocks are gathered on the device and cross the bus as one run. As its bus arranges, a
    copy waits for earlier launches: for the step that wrote the lent blocks, or for a step that may
    still write into the reserved ones.
    """

    def __init__(self, blocks: Tensor, bus: Bus) -> None:
        """blocks: [num_blocks, ...], on the device of the bus. Blocks follow each other in memory
        without gaps, with their axes in any order. Compiles what a copy needs.

        Raises `ValueError` for another layout.
        """
        if not lie_one_after_the_other(blocks):
            raise ValueError(f"blocks of shape {tuple(blocks.shape)} have gaps, or are interleaved")
        elements = blocks[0].numel()
        self._rows = blocks.as_strided((len(blocks), elements), (elements, 1)).view(
            INTEGERS[blocks.itemsize]
        )
        self._bus = bus
        self.block_bytes = elements * blocks.itemsize
        room = self.host_room(self.block_bytes)
        self.gather([0], room)
        self.scatter(room, [0])

    def host_room(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that copies reach quickly."""
        return self._bus.host_room(num_bytes)

    def gather(
        self, block_ids: Sequence[int], room: NDArray[np.uint8], index: int = 0, count: int = 1
    ) -> None:
        """Copy part `index` of `count` of block block_ids[i] to place i of the room."""
        with self._bus.in_turn(to_host=True):
            rows, chunks = self._chunks(block_ids, room, index, count)
            for ids, host, window in chunks:
                gather_blocks(rows, ids, window)
                host.copy_(window, non_blocking=True)

    def scatter(
        self, room: NDArray[np.uint8], block_ids: Sequence[int], index: int = 0, count: int = 1
    ) -> None:
        """Copy place i of the room to part `index` of `count` of block block_ids[i]; no id occurs
        twice."""
        with self._bus.in_turn(to_host=False):
            rows, chunks = self._chunks(block_ids, room, index, count)
            for ids, host, window in chunks:
                window.copy_(host, non_blocking=True)
                scatter_blocks(window, rows, ids)

    def _chunks(
        self, block_ids: Sequence[int], room: NDArray[np.uint8], index: int, count: int
    ) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor, Tensor]]]:
        """All parts of all blocks, [num_blocks * count, elements], and what to copy at a time: as
        much as the window holds. That is ids of parts, their place in the room and in the window.

        Raises `ValueError` for a part that blocks do not have.
        """
        if self._rows.shape[1] % count or not 0 <= index < count:
            raise ValueError(f"blocks of {self.block_bytes} bytes have no part {index} of {count}")
        rows = self._rows.view(-1, self._rows.shape[1] // count)
        ids = np.array(block_ids, np.int64) * count + index
        host = torch.from_numpy(room).view(rows.dtype).view(-1, rows.shape[1])
        return rows, self._cut(rows, ids, host)

    def _cut(
        self, rows: Tensor, ids: NDArray[np.int64], host: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        size = max(1, WINDOW_BYTES // (rows.shape[1] * rows.itemsize))
        for first in range(0, len(ids), size):
            some = ids[first : first + size]
            window = self._bus.window(len(some), rows)
            yield to_device(some, rows.device), host[first : first + len(some)], window


def lie_one_after_the_other(blocks: Tensor) -> bool:
    """Whether blocks [num_blocks, ...] follow each other in memory without gaps, each of them
    contiguous. The axes of a block may be in any order."""
    inner = zip(blocks.stride()[1:], blocks.shape[1:], strict=True)
    expected = 1
    for stride, size in sorted(axis for axis in inner if axis[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return len(blocks) == 1 or blocks.stride(0) == expected
