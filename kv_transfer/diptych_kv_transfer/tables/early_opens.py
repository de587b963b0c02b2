"""Early Opens: claims that arrive before the prefill engine has promised the lease.

The router tells both engines about a request at the same time, so the decode engine may be faster.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import Peer
from diptych_kv_transfer.tables.messages import Open
from diptych_kv_transfer.tables.shares import lease_of

MAX_EARLY, MAX_EARLY_RUNS = 256, 1024
"""Limits on the number of early Opens and on the runs in each. They bound the memory that peers can
make us use. Beyond it, the oldest is forgotten; its reader asks again when its request arrives."""


@dataclass(slots=True)
class EarlyOpen:
    """An Open that waits for its lease."""

    peer: Peer
    message: Open
    forget_at: float


@dataclass(slots=True)
class EarlyOpens:
    """Keeps the last Open of each lease that is not known yet. The caller passes the time."""

    keep_seconds: float
    """An Open that is not renewed for this time is forgotten, because it may be a late copy."""
    _opens: OrderedDict[str, EarlyOpen] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._opens)

    def put(self, peer: Peer, message: Open, now: float) -> None:
        """Remember an Open, in place of an earlier one of the same lease."""
        self._opens.pop(message.lease_id, None)
        self._opens[message.lease_id] = EarlyOpen(peer, message, now + self.keep_seconds)
        if len(self._opens) > MAX_EARLY:
            self._opens.popitem(last=False)

    def pop(self, lease_id: str) -> EarlyOpen | None:
        """Remove and return the Open that waits for this lease, because the lease exists now."""
        return self._opens.pop(lease_id, None)

    def pop_all(self, lease_id: str) -> list[EarlyOpen]:
        """Remove and return the Opens that wait for this lease or for shares of it."""
        names = [name for name in self._opens if lease_of(name) == lease_id]
        return [self._opens.pop(name) for name in names]

    def renew(self, lease_id: str, now: float) -> None:
        """Keep the Open of a lease that a reader still wants."""
        early = self._opens.get(lease_id)
        if early is not None:
            early.forget_at = now + self.keep_seconds

    def close(self, peer: Peer, lease_id: str, tag: int) -> None:
        """Forget the Open of a reader that no longer wants the lease."""
        early = self._opens.get(lease_id)
        if early is not None and (early.peer, early.message.tag) == (peer, tag):
            del self._opens[lease_id]

    def peer_lost(self, peer: Peer) -> None:
        for lease_id in [name for name, early in self._opens.items() if early.peer == peer]:
            del self._opens[lease_id]

    def tick(self, now: float) -> None:
        """Forget the overdue Opens."""
        for lease_id in [name for name, early in self._opens.items() if early.forget_at <= now]:
            del self._opens[lease_id]

    def next_deadline(self) -> float:
        """Return when `tick` has something to do; infinity means never."""
        return min((early.forget_at for early in self._opens.values()), default=float("inf"))
