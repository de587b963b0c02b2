"""The interface of a transport, which moves bytes from one engine to another.

Each transport is a module or a folder of this package, under the name that
`KVTransferConfig.transport` gives, with its class as `TRANSPORT`. One thread owns a transport and
calls everything but `wake`. Only `poll` blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from importlib import import_module
from pkgutil import iter_modules
from typing import ClassVar, Protocol

from diptych_kv_transfer.memory.shard import MemoryKind, MemoryRegion
from diptych_kv_transfer.signing.references import HingeKey
from diptych_kv_transfer.tables.actions import Address, Event, Peer
from diptych_protocol import InvalidRequestError


class Transport(Protocol):
    """Connections that carry control messages and blocks."""

    reaches: ClassVar[Set[MemoryKind]]
    """The kinds of memory that it reads and writes in place."""

    def __init__(self, host: str, port: int, key: HingeKey) -> None:
        """Listen at an IP address; port 0 takes a free one.

        key: the key that the other side of each connection must have, too.

        Raises `OSError` when the port is not available.
        """

    @property
    def port(self) -> int:
        """The port at which the transport listens."""

    @property
    def name(self) -> str:
        """The way of the last blocks: `cma` (read on one host), `tcp`, …; empty before."""

    def connect(self, address: Address) -> None:
        """Begin to connect; ends in Connected or ConnectFailed."""

    def send(self, peer: Peer, data: bytes) -> None:
        """Send a control message. A message to a lost peer is dropped."""

    def send_blocks(
        self, peer: Peer, key: Hashable, tag: int, regions: Sequence[MemoryRegion]
    ) -> None:
        """Send regions under a tag; ends in TransferEnded(key).

        The transport may read them until then, even if the receiver has them sooner.
        """

    def receive_blocks(
        self, peer: Peer, key: Hashable, tag: int, regions: Sequence[MemoryRegion]
    ) -> None:
        """Receive what the peer sends under a tag, region for region; ends in TransferEnded(key).

        It fails if the sizes differ.
        """

    def fence(self, peer: Peer) -> None:
        """Cut a connection. It ends in PeerLost; then none of its transfers touches memory."""

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Return events, and wait at most this long if there are none. `wake` ends the wait."""

    def wake(self) -> None:
        """End a `poll` that waits. This is the only method for other threads."""

    def close(self) -> None:
        """Cut every connection and stop listening. Safe to call twice."""


TRANSPORTS = tuple(found.name for found in iter_modules(__path__))
"""The names of all transports."""


def transport_named(name: str) -> type[Transport]:
    """Load a transport. Raises `InvalidRequestError` for an unknown name."""
    if name not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise InvalidRequestError(
            f"kv_transfer.transport must be one of {known}, not {name!r}", param="transport"
        )
    transport: type[Transport] = import_module(f"{__name__}.{name}").TRANSPORT
    return transport
