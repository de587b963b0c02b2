"""A bounded queue for each client; the clients take turns."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container
from typing import Generic, TypeVar

from diptych_protocol import EngineOverloadedError

T = TypeVar("T")

SMALL_BYTES = 16 << 10
"""An item up to this size is accepted however much other clients have waiting."""


class Turns(Generic[T]):
    """The waiting items, by client. Each client with waiting items has one turn per round, so that
    one with a thousand requests delays another's by one of them, not by all."""

    def __init__(self, max_bytes: int) -> None:
        """This many bytes of items may wait, half of them of one client. Other clients' items never
        keep small ones out."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._bytes_of = Counter[str]()
        self._queues: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, client: str, item: T, size: int) -> None:
        """Add an item. Raises `EngineOverloadedError` if too much waits already."""
        if self._bytes_of[client] + size > self._max_bytes // 2:
            raise EngineOverloadedError(
                "too many large requests of this client wait already; retry later"
            )
        if size > SMALL_BYTES and self._bytes + size > self._max_bytes:
            raise EngineOverloadedError("too many large requests wait already; retry later")
        self._queues.setdefault(client, deque()).append((item, size))
        self._bytes += size
        self._bytes_of[client] += size

    def take(self, without: Container[str] = ()) -> tuple[str, T] | None:
        """Remove and return the next item and its client, who then comes last. without: clients to
        skip. None if nobody else waits."""
        client = next((client for client in self._queues if client not in without), None)
        if client is None:
            return None
        queue = self._queues[client]
        item, size = queue.popleft()
        self._bytes -= size
        self._bytes_of[client] -= size
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client], self._bytes_of[client]
        return client, item
