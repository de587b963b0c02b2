"""The decisions of the hinge: both tables of one engine, and the peers that have said Hello.

Events and the time go in, actions come out. `hinge_thread.py` performs the I/O.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import (
    Action,
    Connected,
    ConnectFailed,
    Event,
    Fence,
    Peer,
    PeerLost,
    Received,
    ReceiveKey,
    Send,
    SendKey,
    TransferEnded,
)
from diptych_kv_transfer.tables.leases import LeaseTable
from diptych_kv_transfer.tables.loads import LoadTable
from diptych_kv_transfer.tables.messages import (
    Close,
    Hello,
    Open,
    Reject,
    RemoteProtocolError,
    Renew,
    decode,
)
from diptych_protocol import KVTransferStats

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Hinge:
    """One engine's state in all hand-offs, as a prefill engine and as a decode engine."""

    me: Hello
    leases: LeaseTable
    loads: LoadTable
    greeted: set[Peer] = field(default_factory=set)
    """Peers that have said Hello."""
    totals: KVTransferStats = field(default_factory=KVTransferStats)
    """What both tables count, and whoever carries out their actions."""

    def __post_init__(self) -> None:
        self.leases.totals = self.loads.totals = self.totals

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions that an event requires."""
        match event:
            case Connected(peer, address):
                if address is None:
                    return [Send(peer, self.me)]
                return self.loads.connected(address, peer, now)
            case ConnectFailed(address, reason):
                return self.loads.connect_failed(address, reason, now)
            case Received(peer, data):
                return self._receive(peer, data, now)
            case TransferEnded(SendKey(tag, lease_id)):
                return self.leases.sends_ended(lease_id, tag)
            case TransferEnded(ReceiveKey(tag, request_id), ok):
                return self.loads.receives_ended(request_id, tag, ok=ok, now=now)
            case TransferEnded(key):
                raise TypeError(f"{key!r} is the key of no transfer that was asked for")
            case PeerLost(peer):
                self.greeted.discard(peer)
                return [*self.leases.peer_lost(peer), *self.loads.peer_lost(peer, now)]

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due because time has passed."""
        return [*self.leases.tick(now), *self.loads.tick(now)]

    def next_deadline(self) -> float:
        """Return when `tick` has something to do; infinity means never."""
        return min(self.leases.next_deadline(), self.loads.next_deadline())

    def _receive(self, peer: Peer, data: bytes, now: float) -> list[Action]:
        try:
            message = decode(data)
            if peer not in self.greeted and not isinstance(message, Hello):
                raise RemoteProtocolError("it spoke before it said who it is")
        except RemoteProtocolError as exc:
            log.warning("a peer broke the protocol, cutting it off: %s", exc)
            return [Fence(peer)]
        match message:
            case Hello():
                self.greeted.add(peer)
                return self.loads.greeted(peer, message, now)
            case Open() | Close() | Renew() | Reject():
                return self.leases.receive(peer, message, now)
            case _:
                return self.loads.receive(peer, message, now)
