"""Whose turn it is: a bounded queue for each client, served one after the other."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from diptych_protocol import EngineOverloadedError

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits, by client. Each client with something waiting has one turn in a round, so that
    one with a thousand requests delays another's by one of them, not by all."""

    def __init__(self, *, max_of_one: int, max_bytes: int) -> None:
        """`max_of_one` items of one client may wait, and `max_bytes` of all of them together."""
        self._max_of_one = max_of_one
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queues: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, client: str, item: T, size: int) -> None:
        """Raises `EngineOverloadedError` if too much waits already."""
        queue = self._queues.get(client)
        if queue is not None and len(queue) >= self._max_of_one:
            raise EngineOverloadedError(
                f"{len(queue)} large requests of this client wait already; retry later"
            )
        if self._bytes + size > self._max_bytes:
            raise EngineOverloadedError("too many large requests wait already; retry later")
        if queue is None:
            queue = self._queues[client] = deque()
        queue.append((item, size))
        self._bytes += size

    def take(self) -> T | None:
        """The next item; its client then comes last. None if nothing waits."""
        if not self._queues:
            return None
        client, queue = next(iter(self._queues.items()))
        item, size = queue.popleft()
        self._bytes -= size
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client]
        return item
