"""What the connector needs of a transport, whatever moves the bytes.

One thread owns a transport and calls everything but `wake`. Nothing here waits, except `poll`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.tables.actions import Address, Peer
from diptych_kv_transfer.tables.events import Event

Buffer = NDArray[np.uint8]
"""One run of bytes in the KV memory."""


class Transport(Protocol):
    """Connections that carry control messages and blocks."""

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

    def send_blocks(self, peer: Peer, key: Hashable, tag: int, buffers: Sequence[Buffer]) -> None:
        """Send buffers under a tag; ends in TransferEnded(key).

        They are read until then, though the receiver may have them sooner.
        """

    def receive_blocks(
        self, peer: Peer, key: Hashable, tag: int, buffers: Sequence[Buffer]
    ) -> None:
        """Receive what the peer sends under a tag, buffer for buffer; ends in TransferEnded(key).

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
