"""Events that the pure tables receive. A transport or a simulation creates them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from diptych_kv_transfer.tables.actions import Address, Peer


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection exists: to `address` if we opened it; None if the peer opened it."""

    peer: Peer
    address: Address | None


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A control message has arrived."""

    peer: Peer
    data: bytes


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A `send_blocks` or `receive_blocks` has ended, and no longer touches its regions."""

    key: Hashable
    """The key that began the transfer. A transport does not interpret it."""
    ok: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A connection has ended, after every transfer on it."""

    peer: Peer


Event = Connected | ConnectFailed | Received | TransferEnded | PeerLost
