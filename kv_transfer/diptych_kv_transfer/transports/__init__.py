"""How bytes get from one engine to another.

Each transport is a module or a folder of this one, under the name that `KVTransferConfig.transport`
gives, with its class as `TRANSPORT`. One thread owns a transport and calls everything but `wake`.
Nothing waits, except `poll`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from importlib import import_module
from pkgutil import iter_modules
from typing import ClassVar, Protocol

from diptych_kv_transfer.memory.region import MemoryKind, MemoryRegion
from diptych_kv_transfer.signing.keys import HingeKey
from diptych_kv_transfer.tables.actions import Address, Peer
from diptych_kv_transfer.tables.events import Event
from diptych_protocol import InvalidRequestError


class Transport(Protocol):
    """Connections that carry control messages and blocks."""

    reaches: ClassVar[Set[MemoryKind]]
    """The kinds of memory that it reads and writes where they are."""

    def __init__(self, host: str, port: int, key: HingeKey) -> None:
        """Listen at an IP address; port 0 takes a free one.

        key: what the other side of each connection must have, too.

        Raises `OSError` when the port cannot be had.
        """

    @property
    def port(self) -> int:
        """Where we listen."""

    @property
    def name(self) -> str:
        """How the last blocks went: `cma` (read on one host), `tcp`, …; empty before."""

    def connect(self, address: Address) -> None:
        """Begin to connect; ends in Connected or ConnectFailed."""

    def send(self, peer: Peer, data: bytes) -> None:
        """Send a control message; one to a lost peer is dropped."""

    def send_blocks(
        self, peer: Peer, key: Hashable, tag: int, regions: Sequence[MemoryRegion]
    ) -> None:
        """Send regions under a tag; ends in TransferEnded(key).

        They are read until then, though the receiver may have them sooner.
        """

    def receive_blocks(
        self, peer: Peer, key: Hashable, tag: int, regions: Sequence[MemoryRegion]
    ) -> None:
        """Receive what the peer sends under a tag, region for region; ends in TransferEnded(key).

        It fails if their sizes differ.
        """

    def fence(self, peer: Peer) -> None:
        """Cut a connection; ends in PeerLost, after which none of its transfers touches memory."""

    def poll(self, timeout_s: float | None) -> list[Event]:
        """What happened; waits for something at most this long. `wake` ends the wait."""

    def wake(self) -> None:
        """End a `poll` that waits. The one method for other threads."""

    def close(self) -> None:
        """Cut every connection and stop listening. Safe to call twice."""


TRANSPORTS = tuple(found.name for found in iter_modules(__path__))
"""The names of all transports."""


def transport_named(name: str) -> type[Transport]:
    """Load a transport. Raises `InvalidRequestError` for a name that none has."""
    if name not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise InvalidRequestError(
            f"kv_transfer.transport must be one of {known}, not {name!r}", param="transport"
        )
    transport: type[Transport] = import_module(f"{__name__}.{name}").TRANSPORT
    return transport
