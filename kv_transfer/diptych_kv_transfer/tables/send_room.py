"""Decides which sends may copy their blocks to the host, where copies stay until they are sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import Peer, SendBlocks


@dataclass(slots=True)
class SendRoom:
    """Limits the room for copies. Sends wait in order until those before them leave room.

    A waiting send keeps its lease's blocks pinned, as a running one does, to copy them later.
    """

    room: int
    """Room in blocks for all sends together. A single send may take more."""
    _waiting: deque[SendBlocks] = field(default_factory=deque)
    _taken: dict[Hashable, int] = field(default_factory=dict)
    """Blocks taken by each send that has begun, by its key."""

    def ask(self, send: SendBlocks) -> list[SendBlocks]:
        """Add a send to the queue. Returns the sends that may begin now."""
        self._waiting.append(send)
        return self._next()

    def ended(self, key: Hashable) -> list[SendBlocks]:
        """Free the room of a send, if it had begun. Returns the sends that may begin now."""
        self._taken.pop(key, None)
        return self._next()

    def peer_lost(self, peer: Peer) -> list[SendBlocks]:
        """Drop the waiting sends to a lost peer. Returns the sends that may begin now.

        The sends to this peer that had begun have ended before.
        """
        self._waiting = deque(send for send in self._waiting if send.peer != peer)
        return self._next()

    def _next(self) -> list[SendBlocks]:
        begin: list[SendBlocks] = []
        while self._waiting:
            send = self._waiting[0]
            blocks = sum(map(len, send.runs))
            if self._taken and sum(self._taken.values()) + blocks > self.room:
                break
            self._taken[send.key] = blocks
            begin.append(self._waiting.popleft())
        return begin
