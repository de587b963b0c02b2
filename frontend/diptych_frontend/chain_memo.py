"""Remembers what was computed of the parts of long sequences, by everything that comes before them.

A name is a digest of a part and of the name of the part before it, back to a root that says who
asks. So who knows a part but not what precedes it, or has another root, finds nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock
from typing import Final

OVERHEAD_BYTES: Final = 250
"""What an entry takes beside its value: name, place and the objects' heads."""


def part_name(before: bytes, part: bytes) -> bytes:
    """Return the name of a part. before: what names all that precedes it, always of one length."""
    return hashlib.sha256(before + part).digest()


def root_name(asker: str) -> bytes:
    """Return the root of the sequences that only askers of this name share."""
    return hashlib.sha256(asker.encode("utf-8", "surrogatepass")).digest()


class ChainMemo:
    """A bounded map from names to bytes; the entries that were used last stay. Several threads may
    use it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values = OrderedDict[bytes, bytes]()
        self._lock = Lock()
        self.num_bytes = 0
        """The memory of all entries, which never exceeds the limit."""

    def get(self, name: bytes) -> bytes | None:
        """Return the value of a part, if it is known."""
        with self._lock:
            value = self._values.get(name)
            if value is not None:
                self._values.move_to_end(name)
        return value

    def put(self, name: bytes, value: bytes) -> None:
        """Remember the value of a part, and forget others if there is no room."""
        with self._lock:
            if name in self._values:
                return
            self._values[name] = value
            self.num_bytes += len(value) + OVERHEAD_BYTES
            while self.num_bytes > self._max_bytes:
                _, oldest = self._values.popitem(last=False)
                self.num_bytes -= len(oldest) + OVERHEAD_BYTES
