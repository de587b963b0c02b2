"""A cache of prepared images that drops the least recently used, by the bytes that they take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final, Generic, TypeVar

MAX_CACHE_BYTES: Final = 256 << 20

T = TypeVar("T")


class ItemCache(Generic[T]):
    """A cache that several threads may use."""

    def __init__(self, size_of: Callable[[T], int], max_bytes: int = MAX_CACHE_BYTES) -> None:
        """An item larger than the cache is not kept."""
        self._size_of = size_of
        self._max_bytes = max_bytes
        self._items: OrderedDict[str, T] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: str) -> T | None:
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
            return item

    def put(self, key: str, item: T) -> None:
        size = self._size_of(item)
        with self._lock:
            if key in self._items or size > self._max_bytes:
                return
            self._items[key] = item
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, oldest = self._items.popitem(last=False)
                self._bytes -= self._size_of(oldest)

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self._bytes = 0
