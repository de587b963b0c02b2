"""Sends blocks through a connection, as tag messages of UCX.

Runs are cut into pieces that UCX sends at once, without asking the receiver first. With many small
runs, round trips would otherwise take most of the time. A piece is received whole or not at all, so
a receive can be cancelled at any moment, as that of a larger message could not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.transports.ucx import requests
from diptych_kv_transfer.transports.ucx.frames import Span
from diptych_kv_transfer.transports.ucx.libucp import IN_PROGRESS, OK, UcpError

PIECE_BYTES = 1 << 20
TAG_BITS = 24
"""The low bits of a tag that count the pieces of a transfer; the others say which transfer."""


class UcxTransfer:
    """The pieces of one transfer, on one side."""

    def __init__(
        self, begun: Iterator[tuple[int, int | None]], regions: Sequence[MemoryRegion]
    ) -> None:
        """Make requests of UCX.

        Args:
            begun: requests, each with the size of what it receives; None: it sends.
            regions: what they move, kept alive.
        """
        self._regions = regions
        self._requests: deque[tuple[int, int | None]] = deque()
        self.ok = True
        """Nothing has gone wrong so far."""
        try:
            for request in begun:
                self._requests.append(request)
        except UcpError:
            self.ok = False

    @property
    def ended(self) -> bool:
        """Whether UCX no longer touches our memory."""
        while self._requests:
            request, wanted = self._requests[0]
            status = requests.status_of(request)
            if status == IN_PROGRESS:
                return False
            self.ok &= status == OK
            if self.ok and wanted is not None:
                self.ok = requests.received_bytes(request) == wanted
            requests.free(request)
            self._requests.popleft()
        return True

    def cancel(self, worker: int) -> None:
        """Cancel the pieces that have not ended."""
        for request, _ in self._requests:
            requests.cancel(worker, request)


def send(endpoint: int, regions: Sequence[MemoryRegion], first_tag: int) -> UcxTransfer:
    """Send regions to the other side of an endpoint."""
    begun = (
        (requests.tag_send(endpoint, address, length, tag), None)
        for tag, (address, length) in enumerate(pieces(regions), first_tag)
    )
    return UcxTransfer(begun, regions)


def receive(worker: int, regions: Sequence[MemoryRegion], first_tag: int) -> UcxTransfer:
    """Receive into regions, from any sender that knows the tags."""
    begun = (
        (requests.tag_receive(worker, address, length, tag), length)
        for tag, (address, length) in enumerate(pieces(regions), first_tag)
    )
    return UcxTransfer(begun, regions)


def pieces(regions: Iterable[MemoryRegion]) -> Iterator[Span]:
    """Cut regions that are longer than a piece."""
    for region in regions:
        for at in range(0, region.length, PIECE_BYTES):
            yield region.address + at, min(PIECE_BYTES, region.length - at)
