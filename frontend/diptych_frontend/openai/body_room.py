"""Limits the memory of bodies that are still arriving."""

from __future__ import annotations

from collections import Counter
from typing import Final

from diptych_protocol import EngineOverloadedError

MAX_ARRIVING_BYTES: Final = 256 << 20
SMALL_BYTES: Final = 16 << 10
"""A body of this size is always accepted. Most are smaller, and their senders should not wait for
slow senders of large ones."""


class BodyRoom:
    """Counts the bytes of large bodies that are not complete. One client may use half
    of the limit."""

    def __init__(self, most: int = MAX_ARRIVING_BYTES) -> None:
        self._most = most
        self._taken = 0
        self._taken_by: Counter[str] = Counter()

    def arrived(self, client: str, before: int, now: int) -> None:
        """Record that a body of that client has grown. Raises `EngineOverloadedError` if that is
        too much."""
        growth = _counted(now) - _counted(before)
        self._taken += growth
        self._taken_by[client] += growth
        if growth and (self._taken > self._most or self._taken_by[client] > self._most // 2):
            raise EngineOverloadedError("too many large bodies are arriving; retry later")

    def ended(self, client: str, size: int) -> None:
        """Record that a body of that client, of which this much had come, is complete or was
        aborted."""
        self._taken -= _counted(size)
        self._taken_by[client] -= _counted(size)
        if not self._taken_by[client]:
            del self._taken_by[client]


def _counted(size: int) -> int:
    return size if size > SMALL_BYTES else 0
