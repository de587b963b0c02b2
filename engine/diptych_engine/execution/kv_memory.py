"""The memory of the KV cache, which can be released while an engine sleeps."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_protocol import InvalidRequestError

SECTOR = 512
"""The unit of `st_blocks`."""


class KVMemory:
    """Zeroed memory at a fixed address.

    On a CPU it is a private mapping, so its pages are aligned and allocated at first use. An engine
    starts at once, an idle one stays small, and released pages are zero when they are used again.
    The hinge may keep the address meanwhile.

    The memory of a tensor-parallel worker may be a mapping of a file without a name (a memfd) that
    the lead maps too, because the hinge runs there. Such a file disappears with the last process
    that has it. Where KV is kept, it is a file that stays, with what it contains.
    """

    def __init__(
        self,
        num_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        shared_fd: int | None = None,
        *,
        kept: bool = False,
    ) -> None:
        """`shared_fd`: a file for the memory; on a CPU only. kept: it was the memory of another
        process, and has all its pages from the start, since one that finds no room ends a process.

        Raises `InvalidRequestError` if the system, or a limit of this process, does not have enough
        memory.
        """
        self._pages: mmap.mmap | None = None
        self._shared = shared_fd is not None
        self._num_bytes = num_bytes
        self._kept_fd = shared_fd if kept else None
        if shared_fd is not None or device.type == "cpu":
            self._pages = _mapped(num_bytes, shared_fd)
            self._reserve()
        if self._pages is not None and not self._shared:
            # Blocks are touched for the first time in the middle of a hand-off. Small pages cost
            # far more there than the copy itself.
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        if self._pages is not None:
            self.tensor: Tensor = torch.frombuffer(self._pages, dtype=dtype)
            """[num_bytes / item size], the cache without its shape."""
        else:
            self.tensor = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)

    def give_back(self) -> None:
        """Release the memory. Nobody may use it until `take_again`."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_REMOVE if self._shared else mmap.MADV_DONTNEED)
        else:
            self.tensor.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def take_again(self) -> None:
        """Allocate it again, zeroed. Harmless if it was never released."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() < self._num_bytes:
            storage.resize_(self._num_bytes)
            self.tensor.zero_()
        self._reserve()

    def _reserve(self) -> None:
        if self._kept_fd is not None:
            reserve(self._kept_fd, self._num_bytes)


def reserve(fd: int, num_bytes: int) -> None:
    """Have a file in the folder of `kv_keep` have all its pages. Raises `InvalidRequestError` if
    there is no room."""
    if os.fstat(fd).st_blocks * SECTOR >= num_bytes:
        return  # of the last core: to look at each page takes 80 ms a GiB
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as exc:
        raise InvalidRequestError(
            f"kv_keep: the folder has no room for {num_bytes / 2**30:.1f} GiB of KV: {exc}; give "
            "its tmpfs more, or ask for fewer kv_cache_bytes",
            param="kv_keep",
        ) from exc


def _mapped(num_bytes: int, shared_fd: int | None) -> mmap.mmap:
    try:
        if shared_fd is None:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        os.ftruncate(shared_fd, num_bytes)
        return mmap.mmap(shared_fd, num_bytes)
    except (OSError, OverflowError) as exc:
        raise InvalidRequestError(
            f"there is no memory for a KV cache of {num_bytes / 2**30:.1f} GiB: {exc}; "
            "ask for fewer bytes, or give the engine more memory",
            param="kv_cache_bytes",
        ) from exc


def map_shared(fd: int, num_blocks: int) -> NDArray[np.uint8]:
    """Map another process's memory in this file as [num_blocks, block_bytes]."""
    pages = mmap.mmap(fd, os.fstat(fd).st_size)
    return np.frombuffer(pages, np.uint8).reshape(num_blocks, -1)
