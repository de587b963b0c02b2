"""Whose turn it is to have blocks copied to the host, where they lie until they are sent. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import Peer, SendBlocks


@dataclass(slots=True)
class SendRoom:
    """Sends wait in their order while those before them fill the room.

    What waits keeps its lease's blocks pinned like any send in flight, so they can be copied
    whenever its turn comes.
    """

    room: int
    """In blocks, of all sends together; a single one may take more."""
    _waiting: deque[SendBlocks] = field(default_factory=deque)
    _taken: dict[Hashable, int] = field(default_factory=dict)
    """By the keys of sends that have begun."""

    def ask(self, send: SendBlocks) -> list[SendBlocks]:
        """What may begin now that this send is wanted, too."""
        self._waiting.append(send)
        return self._next()

    def ended(self, key: Hashable) -> list[SendBlocks]:
        """What may begin now that a send has ended; nothing changes if it had not begun."""
        self._taken.pop(key, None)
        return self._next()

    def peer_lost(self, peer: Peer) -> list[SendBlocks]:
        """What may begin now that nothing more can be sent to a peer.

        Its sends that had begun have ended before.
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
