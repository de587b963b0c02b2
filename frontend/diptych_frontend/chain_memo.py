"""Caches by the memory that they take; one of them remembers what was computed of the parts of long
sequences, by everything that comes before them.

A name is a digest of a part and of the name of the part before it, back to a root that says who
asks. So who knows a part but not what precedes it, or has another root, finds nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

OVERHEAD_BYTES: Final = 250
"""What an entry takes beside its value: name, place and the objects' heads."""


def part_name(before: bytes, part: bytes) -> bytes:
    """Return the name of a part. before: what names all that precedes it, always of one length."""
    return hashlib.sha256(before + part).digest()


def root_name(asker: str) -> bytes:
    """Return the root of the sequences that only askers of this name share."""
    return hashlib.sha256(asker.encode("utf-8", "surrogatepass")).digest()


class ItemCache(Generic[K, T]):
    """A map of bounded memory that keeps the entries that were used last. Several threads may use
    it."""

    def __init__(
        self, size_of: Callable[[T], int], max_bytes: int, overhead_bytes: int = 0
    ) -> None:
        """An item larger than the cache is not kept. overhead_bytes: what an entry takes beside its
        item."""
        self._size_of, self._max_bytes, self._overhead = size_of, max_bytes, overhead_bytes
        self._items: OrderedDict[K, T] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0
        """The memory of all entries, which never exceeds the limit."""

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: K) -> T | None:
        with self._lock:
            value = self._items.get(name)
            if value is not None:
                self._items.move_to_end(name)
            return value

    def put(self, name: K, value: T) -> None:
        """Remember a value, and forget others if there is no room."""
        size = self._size_of(value) + self._overhead
        with self._lock:
            if name in self._items or size > self._max_bytes:
                return
            self._items[name] = value
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, oldest = self._items.popitem(last=False)
                self.num_bytes -= self._size_of(oldest) + self._overhead

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self.num_bytes = 0


class ChainMemo(ItemCache[bytes, bytes]):
    """A bounded map from names to bytes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(len, max_bytes, OVERHEAD_BYTES)
