"""What a worker does to sleep and to wake up, with its own memory.

While a weight's storage has no bytes, its tensor and all views of it stay. So code that holds one
need not know of it. A mapped file keeps its addresses: its pages leave this process, and come back.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from diptych_engine.execution.kv_memory import KVMemory
from diptych_engine.execution.processor import give_freed_memory_back

MADV_POPULATE_READ: Final = 22
"""From Linux's mman.h: map all pages now."""


class WorkerMemory:
    """The weights and the KV cache of one worker."""

    def __init__(
        self,
        weights: Callable[[], Iterable[Tensor]],
        reload: Callable[[], None],
        kv_memory: KVMemory,
    ) -> None:
        """`weights` names the tensors. `reload` fills them from the model's source, and may replace
        some of them."""
        self._weights = weights
        self._reload = reload
        self._kv_memory = kv_memory
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        """Storages that were emptied, and the bytes they had."""
        self._aside: mmap.mmap | list[Tensor] | None = None

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods for `collective_rpc`, but not for clients."""
        return {
            "_put_weights_aside": self.put_weights_aside,
            "_drop_weights": self.drop_weights,
            "_restore_weights": self.restore_weights,
            "_drop_kv_cache": self._kv_memory.give_back,
            "_restore_kv_cache": self._kv_memory.take_again,
        }

    def put_weights_aside(self) -> None:
        """Release the weights' memory, and save their bytes elsewhere.

        Raises `OSError` if the disk has no room; nothing has changed then.
        """
        storages, _ = _storages_of(self._weights())
        on_cpu = storages[0].device.type == "cpu"
        self._aside = _to_file(storages) if on_cpu else [_tensor_of(s).cpu() for s in storages]
        self._release_weights()

    def drop_weights(self) -> None:
        """Release the weights' memory, and delete what was saved."""
        self._aside = None
        self._release_weights()

    def restore_weights(self) -> None:
        """Restore the weights from what was saved, or else from the model's source.

        Harmless if they are in memory. After a failure they are absent as before, and it may be
        tried again.
        """
        if not self._away:
            return
        try:
            for storage, size in self._away:
                storage.resize_(size)
            self._fill([storage for storage, _ in self._away])
        except BaseException:
            for storage, _ in self._away:
                storage.resize_(0)
            raise
        self._away, self._aside = [], None
        for storage in _storages_of(self._weights())[1]:
            _advise(storage, MADV_POPULATE_READ)  # before the next step wants it

    def _fill(self, storages: list[torch.UntypedStorage]) -> None:
        match self._aside:
            case None:
                self._reload()
            case [*copies]:
                for storage, copy in zip(storages, copies, strict=True):
                    _tensor_of(storage).copy_(copy)
            case file:
                file.seek(0)
                for storage in storages:
                    _memory_of(storage)[:] = file.read(storage.nbytes())

    def _release_weights(self) -> None:
        """Harmless if they are away."""
        if self._away:
            return
        storages, mapped = _storages_of(self._weights())
        for storage in mapped:
            _advise(storage, mmap.MADV_DONTNEED)
        self._away = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        if storages[0].device.type == "cuda":
            torch.cuda.empty_cache()
        give_freed_memory_back()


def _storages_of(
    weights: Iterable[Tensor],
) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
    """Each memory once, because tensors may be parts of a larger one: first what can be given up,
    then files that are mapped."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in weights}
    own = [storage for storage in found.values() if storage.resizable()]
    return own, [storage for storage in found.values() if not storage.resizable()]


def _advise(mapped: torch.UntypedStorage, advice: int) -> None:
    """Tell the kernel about a mapping. It may not know the advice, which changes no content."""
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes()), advice
    )


def _to_file(storages: list[torch.UntypedStorage]) -> mmap.mmap:
    """Where nobody else finds it, and gone with this process."""
    with tempfile.TemporaryFile(prefix="diptych-weights-") as file:
        for storage in storages:
            file.write(_memory_of(storage))
        file.flush()
        total = sum(storage.nbytes() for storage in storages)
        return mmap.mmap(file.fileno(), total, access=mmap.ACCESS_READ)


def _tensor_of(storage: torch.UntypedStorage) -> Tensor:
    """[bytes] uint8: a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage on the CPU. Not by way of NumPy, which would fix its size."""
    array = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")
