"""Opens of prefixes, which wait until the engine says which of the blocks it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import Peer, PrefixAsked
from diptych_kv_transfer.tables.messages import Open

MAX_ASKS = 64
"""Limit on the questions that the engine has not answered yet; it answers between two steps.
Questions that were taken back count too, because the engine gets them all the same."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An Open that waits until a lease for it is made."""

    peer: Peer
    message: Open

    def to_engine(self) -> PrefixAsked:
        """The question for the engine."""
        message = self.message
        first = min(first for first, _ in message.runs)
        return PrefixAsked(message.lease_id, message.names, first, message.digest)


@dataclass(slots=True)
class PrefixAsks:
    """The questions that the engine has not answered, by the ids of their leases."""

    num_groups: int = 1
    """How many blocks a name stands for: one of each group of layers."""
    _asks: dict[str, Ask] = field(default_factory=dict)
    _num_unanswered: int = 0

    def __len__(self) -> int:
        return len(self._asks)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._asks

    def why_not(self, message: Open) -> str:
        """Return why a question is refused without asking the engine; empty if it is not."""
        if message.lease_id in self._asks:
            return "another reader asks for this lease"
        if not message.runs:
            return "no block of the prefix is asked for"
        most = len(message.names) * self.num_groups
        if sum(count for _, count in message.runs) > most:
            return "more blocks are asked for than the prefix has"
        if any(first + count > most for first, count in message.runs):
            return "blocks behind the end of the prefix are asked for"
        return "" if self._num_unanswered < MAX_ASKS else "too many prefixes are asked for"

    def repeats(self, peer: Peer, message: Open) -> bool:
        """Whether the message repeats one that waits."""
        ask = self._asks.get(message.lease_id)
        return ask is not None and (ask.peer, ask.message) == (peer, message)

    def put(self, peer: Peer, message: Open) -> PrefixAsked:
        """Store a question. Returns the question for the engine."""
        self._num_unanswered += 1
        ask = self._asks[message.lease_id] = Ask(peer, message)
        return ask.to_engine()

    def pop(self, lease_id: str) -> Ask | None:
        """Remove and return an answered question; None if its reader has given up."""
        self._num_unanswered -= 1
        return self._asks.pop(lease_id, None)

    def give_up(self, peer: Peer, lease_id: str) -> bool:
        """Forget the question of a reader that gave up; False if it asked for another lease."""
        ask = self._asks.get(lease_id)
        if ask is None or ask.peer != peer:
            return False
        del self._asks[lease_id]
        return True

    def peer_lost(self, peer: Peer) -> None:
        for lease_id in [name for name, ask in self._asks.items() if ask.peer == peer]:
            del self._asks[lease_id]
