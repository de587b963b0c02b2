"""What the world reports to the pure tables; a transport makes these, and so does a simulation."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from diptych_kv_transfer.tables.actions import Address, Peer


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection exists: to `address` if we asked for it, else from somebody (None)."""

    peer: Peer
    address: Address | None


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A control message."""

    peer: Peer
    data: bytes


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A `send_blocks` or `receive_blocks` has ended, and touches its regions no more."""

    key: Hashable
    """What the transfer was begun with; a transport does not look into it."""
    ok: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A connection ended; every transfer on it has ended before."""

    peer: Peer


Event = Connected | ConnectFailed | Received | TransferEnded | PeerLost
