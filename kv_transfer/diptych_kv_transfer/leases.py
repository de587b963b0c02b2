"""P's side of the hinge: who may read the blocks of finished prefills, and until when.

    GRANTED ──Open──▶ READING ──Close(ok)──▶ RELEASED
       │ Reject, revoke   │ Reject, revoke, Close(not ok), peer lost
       ├──────────────────┴────────────────▶ REVOKED
       │ time                  time
       └───────────────────────────────────▶ EXPIRED

A lease ends exactly once, and its blocks are given back (`LeaseEnded`) exactly once: when it has
ended *and* no send of them is in flight. Ending revokes the reader's claim at once, so its Close
is answered `held=False` even while sends are still draining. Pure: time is passed in.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from diptych_kv_transfer.actions import Action, Fence, LeaseEnded, Peer, Send, SendBlocks
from diptych_kv_transfer.messages import (
    Close,
    Closed,
    FromReader,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
)

MAX_REMEMBERED = 4096
"""Ended leases whose late messages still get the right answer."""


class LeaseState(enum.Enum):
    GRANTED = "granted"
    READING = "reading"
    RELEASED = "released"
    REVOKED = "revoked"
    EXPIRED = "expired"


LIVE = frozenset({LeaseState.GRANTED, LeaseState.READING})
TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.GRANTED: frozenset({LeaseState.READING, LeaseState.REVOKED, LeaseState.EXPIRED}),
    LeaseState.READING: frozenset({LeaseState.RELEASED, LeaseState.REVOKED, LeaseState.EXPIRED}),
    LeaseState.RELEASED: frozenset(),
    LeaseState.REVOKED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
}


@dataclass(slots=True)
class Lease:
    """The right to read some blocks, for whoever knows its id and its tokens."""

    lease_id: str
    request_id: str
    block_ids: list[int]
    digest: str
    expires_at: float
    state: LeaseState = LeaseState.GRANTED
    reader: Peer | None = None
    claim: Open | None = None
    """The Open that claimed it."""
    sending: bool = False
    """Sends of its blocks are in flight."""
    fence_at: float = float("inf")
    """When to cut off a reader that keeps the blocks of an ended lease busy."""

    def become(self, state: LeaseState) -> None:
        """Change state. An illegal transition raises and changes nothing."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"lease of {self.request_id}: {self.state} -> {state}")
        self.state = state


@dataclass(slots=True)
class LeaseTable:
    """All leases of one prefill engine."""

    lease_seconds: float
    leases: dict[str, Lease] = field(default_factory=dict)
    """Live ones, and ended ones whose blocks are still being sent."""
    counts: dict[LeaseState, int] = field(default_factory=lambda: dict.fromkeys(LeaseState, 0))
    """How many leases ever entered each state."""
    stale_reads_refused: int = 0
    _ended: OrderedDict[str, tuple[LeaseState, Peer | None]] = field(default_factory=OrderedDict)

    def grant(
        self, lease_id: str, request_id: str, block_ids: list[int], digest: str, now: float
    ) -> None:
        """Pin blocks for a reader to come."""
        self.leases[lease_id] = Lease(
            lease_id, request_id, block_ids, digest, now + self.lease_seconds
        )
        self.counts[LeaseState.GRANTED] += 1

    def receive(self, peer: Peer, message: FromReader, now: float) -> list[Action]:
        """Answer a reader's message."""
        match message:
            case Open():
                return self._open(peer, message, now)
            case Close():
                return self._close(peer, message)
            case Renew():
                for lease_id in message.lease_ids:
                    lease = self.leases.get(lease_id)
                    if lease is not None and lease.state in LIVE:
                        lease.expires_at = now + self.lease_seconds
                return []
            case Reject():
                return self.revoke(message.lease_id)

    def _open(self, peer: Peer, message: Open, now: float) -> list[Action]:
        lease = self.leases.get(message.lease_id)
        if lease is not None and lease.reader == peer and lease.claim == message:
            return [Send(peer, Opened(message.lease_id))]  # the same Open, repeated
        reason = self._why_not(lease, message)
        if lease is None or reason:
            self.stale_reads_refused += 1
            return [Send(peer, Refused(message.lease_id, reason))]
        lease.become(LeaseState.READING)
        self.counts[LeaseState.READING] += 1
        lease.reader, lease.claim = peer, message
        lease.expires_at = now + self.lease_seconds
        actions: list[Action] = [Send(peer, Opened(lease.lease_id))]
        if message.runs:
            lease.sending = True
            runs = [
                range(lease.block_ids[first], lease.block_ids[first] + count)
                for first, count in message.runs
            ]
            actions.append(SendBlocks(peer, lease.lease_id, message.tag, runs))
        return actions

    def _why_not(self, lease: Lease | None, message: Open) -> str:
        """Why a lease cannot be opened; empty if it can."""
        if lease is None:
            ended = self._ended.get(message.lease_id)
            return f"the lease has {ended[0].value}" if ended else "unknown lease"
        if lease.state is not LeaseState.GRANTED:
            return f"the lease is {lease.state.value}"
        if message.digest != lease.digest:
            return "the lease is for another prompt"
        if sum(count for _, count in message.runs) > len(lease.block_ids):
            return "more blocks are asked for than the lease has"
        for first, count in message.runs:
            blocks = lease.block_ids[first : first + count]
            if len(blocks) != count or blocks != list(range(blocks[0], blocks[0] + count)):
                return f"blocks {first}..{first + count - 1} are not one run of the lease"
        return ""

    def _close(self, peer: Peer, message: Close) -> list[Action]:
        lease = self.leases.get(message.lease_id)
        if lease is None or lease.state is not LeaseState.READING:
            state, reader = self._ended.get(message.lease_id, (None, None))
            held = state is LeaseState.RELEASED and reader == peer
            return [Send(peer, Closed(message.lease_id, held))]
        if lease.reader != peer:
            return [Send(peer, Closed(message.lease_id, held=False))]
        outcome = LeaseState.RELEASED if message.ok else LeaseState.REVOKED
        return [Send(peer, Closed(lease.lease_id, held=message.ok)), *self._end(lease, outcome)]

    def revoke(self, lease_id: str) -> list[Action]:
        """End a lease before its time. Unknown or ended ones are left alone."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.state not in LIVE:
            return []
        return self._end(lease, LeaseState.REVOKED)

    def revoke_all(self) -> list[Action]:
        """End every live lease before its time."""
        return [action for lease_id in list(self.leases) for action in self.revoke(lease_id)]

    def sends_ended(self, lease_id: str) -> list[Action]:
        """No send of this lease's blocks is in flight any more, however that came."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return []
        lease.sending = False
        return [] if lease.state in LIVE else self._give_back(lease)

    def peer_lost(self, peer: Peer) -> list[Action]:
        """A connection is gone, and with it every send on it."""
        actions: list[Action] = []
        for lease in [x for x in self.leases.values() if x.reader == peer]:
            lease.sending = False
            if lease.state in LIVE:
                actions += self._end(lease, LeaseState.REVOKED)
            else:
                actions += self._give_back(lease)
        return actions

    def tick(self, now: float) -> list[Action]:
        """End what is overdue."""
        actions: list[Action] = []
        for lease in list(self.leases.values()):
            if lease.state in LIVE and lease.expires_at <= now:
                actions += self._end(lease, LeaseState.EXPIRED)
            elif lease.fence_at <= now and lease.reader is not None:
                lease.fence_at = float("inf")
                actions.append(Fence(lease.reader))
        return actions

    def next_deadline(self) -> float:
        """When `tick` has something to do; infinity: never."""
        return min(
            (x.expires_at if x.state in LIVE else x.fence_at for x in self.leases.values()),
            default=float("inf"),
        )

    def _end(self, lease: Lease, outcome: LeaseState) -> list[Action]:
        lease.become(outcome)
        self.counts[outcome] += 1
        self._ended[lease.lease_id] = (outcome, lease.reader)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        if lease.sending:
            lease.fence_at = lease.expires_at + self.lease_seconds
            return []
        return self._give_back(lease)

    def _give_back(self, lease: Lease) -> list[Action]:
        del self.leases[lease.lease_id]
        return [LeaseEnded(lease.request_id, lease.block_ids, lease.state.value)]

    @property
    def blocks_held(self) -> int:
        """Blocks that leases keep from being reused. Safe to ask from another thread."""
        return sum(len(lease.block_ids) for lease in list(self.leases.values()))
