"""Opens of prefixes: what other engines asked for by name, until the engine says what it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import Peer, PrefixAsked
from diptych_kv_transfer.tables.messages import Open

MAX_ASKS = 64
"""Limit on the questions that the engine has not answered, which it does between two steps. Those
that were taken back count, too: the engine is told of them all the same."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An Open that waits for the lease that it asks for."""

    peer: Peer
    message: Open

    def to_engine(self) -> PrefixAsked:
        """The question to the engine."""
        message = self.message
        return PrefixAsked(message.lease_id, message.names, min(first for first, _ in message.runs))


@dataclass(slots=True)
class PrefixAsks:
    """The questions that the engine has not answered, by the ids of their leases. Pure."""

    _asks: dict[str, Ask] = field(default_factory=dict)
    _num_unanswered: int = 0

    def __len__(self) -> int:
        return len(self._asks)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._asks

    def why_not(self, message: Open) -> str:
        """Why a question is refused unasked; empty if it is not."""
        if message.lease_id in self._asks:
            return "another reader asks for this lease"
        if not message.runs:
            return "no block of the prefix is asked for"
        if sum(count for _, count in message.runs) > len(message.names):
            return "more blocks are asked for than the prefix has"
        if any(first + count > len(message.names) for first, count in message.runs):
            return "blocks behind the end of the prefix are asked for"
        return "" if self._num_unanswered < MAX_ASKS else "too many prefixes are asked for"

    def repeats(self, peer: Peer, message: Open) -> bool:
        """Whether the message is a repetition of one that waits."""
        ask = self._asks.get(message.lease_id)
        return ask is not None and (ask.peer, ask.message) == (peer, message)

    def put(self, peer: Peer, message: Open) -> PrefixAsked:
        """Remember a question. Returns what the engine is to be asked."""
        self._num_unanswered += 1
        ask = self._asks[message.lease_id] = Ask(peer, message)
        return ask.to_engine()

    def pop(self, lease_id: str) -> Ask | None:
        """The engine has answered; None: nobody wants to know any more."""
        self._num_unanswered -= 1
        return self._asks.pop(lease_id, None)

    def give_up(self, peer: Peer, lease_id: str) -> bool:
        """Its reader does not want the lease any more; False: it did not ask for one."""
        ask = self._asks.get(lease_id)
        if ask is None or ask.peer != peer:
            return False
        del self._asks[lease_id]
        return True

    def peer_lost(self, peer: Peer) -> None:
        for lease_id in [name for name, ask in self._asks.items() if ask.peer == peer]:
            del self._asks[lease_id]
