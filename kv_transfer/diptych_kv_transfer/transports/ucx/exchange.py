"""The transfers of one connection: how blocks get to the receiver, and when a transfer is over.

The receiver decides. It reads the sender's memory directly if that is a process of its host, and
else has the blocks sent through the connection. In both cases two messages are enough, whatever the
number of runs; `frames.py` shows them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from diptych_kv_transfer.memory.shard import MemoryRegion
from diptych_kv_transfer.tables.actions import TransferEnded
from diptych_kv_transfer.transports.ucx import ucx_transfer
from diptych_kv_transfer.transports.ucx.frames import AnyFrame, Introduction, Moved, Offer, Send
from diptych_kv_transfer.transports.ucx.libucp import UcpError
from diptych_kv_transfer.transports.ucx.same_host import OtherProcess, Reading, SameHost
from diptych_kv_transfer.transports.ucx.ucx_transfer import UcxTransfer
from diptych_kv_transfer.transports.ucx.worker import Endpoint, Worker

log = logging.getLogger(__name__)

MAX_UNCLAIMED_OFFERS, MAX_UNCLAIMED_RUNS = 4096, 1 << 20
"""Limits on offers that nobody has asked for, and on their runs: only malice exceeds them."""
TRANSFER_BITS = 38
"""The number of bits of a UCX tag that identify the transfer. They are random, so that no other
peer can send to it."""


class ExchangeError(Exception):
    """The connection is useless: the peer broke the protocol, or UCX refused."""


@dataclass(slots=True)
class _Outgoing:
    key: Hashable
    regions: Sequence[MemoryRegion]
    transfer: UcxTransfer | None = None


@dataclass(slots=True)
class _Incoming:
    key: Hashable
    regions: Sequence[MemoryRegion]
    reading: Reading | None = None
    transfer: UcxTransfer | None = None


class Exchange:
    """Sends and receives of blocks over one connection."""

    def __init__(
        self,
        endpoint: Endpoint,
        worker: Worker,
        same_host: SameHost | None,
        say: Callable[[AnyFrame], None],
        *,
        accepted: bool,
    ) -> None:
        """Introduce ourselves if the other side connected to us.

        Args:
            same_host: how processes of this host read each other; None: they may not.
            say: sends a frame to the other side, in order.
            accepted: the other side connected to us.
        """
        self._endpoint = endpoint
        self._worker = worker
        self._same_host = same_host
        self._say = say
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._offers: dict[int, Offer] = {}
        """Offers by tag, of blocks that we have not asked for yet."""
        self._offered_runs = 0
        """Number of runs in all of these offers."""
        self._introduced = accepted
        """The other side has introduced itself, or must not."""
        self._source: OtherProcess | None = None
        """The other side, if we may read its memory."""
        self._ended: list[TransferEnded] = []
        self.way = ""
        """How the last blocks went, for example `cma` or `tcp`."""
        if accepted and same_host is not None:
            say(same_host.introduction)

    # --- what the owner asks ------------------------------------------------------------------

    def send(self, key: Hashable, tag: int, regions: Sequence[MemoryRegion]) -> None:
        """Offer regions to the other side. Raises `ExchangeError`."""
        if tag in self._outgoing:
            raise ExchangeError("it has two transfers under one tag")
        self._outgoing[tag] = _Outgoing(key, regions)
        self._say(Offer(tag, [(region.address, region.length) for region in regions]))

    def receive(self, key: Hashable, tag: int, regions: Sequence[MemoryRegion]) -> None:
        """Receive into regions what the other side offers, or will offer, under a tag.

        Raises `ExchangeError`.
        """
        if tag in self._incoming:  # UCX would go on writing to the regions of the former
            raise ExchangeError("it has two transfers under one tag")
        self._incoming[tag] = _Incoming(key, regions)
        offer = self._offers.pop(tag, None)
        if offer is not None:
            self._offered_runs -= len(offer.runs)
            self._begin(offer)

    @property
    def busy(self) -> bool:
        """Whether `advance` has work that does not wait for the network."""
        return any(incoming.reading is not None for incoming in self._incoming.values())

    def advance(self) -> list[TransferEnded]:
        """Continue the running transfers. Returns those that have ended since the last call.

        Raises `ExchangeError`.
        """
        for tag, incoming in list(self._incoming.items()):
            if incoming.reading is not None:
                self._read_on(tag, incoming.reading)
            elif incoming.transfer is not None and incoming.transfer.ended:
                self._received(tag, ok=incoming.transfer.ok)
        for tag, outgoing in list(self._outgoing.items()):
            if outgoing.transfer is not None and outgoing.transfer.ended:
                self._sent(tag, ok=outgoing.transfer.ok)
        return self.take_ended()

    def take_ended(self) -> list[TransferEnded]:
        """Return the transfers that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def abandon(self) -> list[UcxTransfer]:
        """End every transfer because the connection is gone; `take_ended` reports them.

        Returns the transfers that UCX may still work on. Our memory is safe when all have `ended`.
        """
        begun = [outgoing.transfer for outgoing in self._outgoing.values()]
        begun += [incoming.transfer for incoming in self._incoming.values()]
        transfers = [one for one in begun if one is not None]
        for one in transfers:
            one.cancel(self._worker.handle)
        for tag in list(self._outgoing):
            self._sent(tag, ok=False)
        for tag in list(self._incoming):
            self._received(tag, ok=False)
        if self._source is not None:
            self._source.close()
            self._source = None
        return transfers

    # --- what the other side says -------------------------------------------------------------

    def handle(self, frame: AnyFrame) -> None:
        """Act on a frame. Raises `ExchangeError` when it should not have been sent."""
        match frame:
            case Introduction():
                self._meet(frame)
            case Offer(tag) if tag in self._incoming:
                self._begin(frame)
            case Offer(tag):
                self._keep(frame)
            case Send():
                self._pass(frame)
            case Moved(tag, ok):
                outgoing = self._outgoing.get(tag)
                if outgoing is None or outgoing.transfer is not None:
                    raise ExchangeError("it says that it has read what it was not offered")
                self.way = "cma"
                self._sent(tag, ok=ok)

    def _keep(self, offer: Offer) -> None:
        """Keep an offer until its blocks are asked for."""
        if offer.tag in self._offers:
            raise ExchangeError("it offers twice")
        self._offered_runs += len(offer.runs)
        if len(self._offers) >= MAX_UNCLAIMED_OFFERS or self._offered_runs > MAX_UNCLAIMED_RUNS:
            raise ExchangeError("too many offers of blocks that nobody asked for")
        self._offers[offer.tag] = offer

    def _meet(self, other: Introduction) -> None:
        if self._introduced:
            raise ExchangeError("it introduces itself without being asked")
        self._introduced = True
        if self._same_host is not None:
            self._source = self._same_host.meet(other)

    def _begin(self, offer: Offer) -> None:
        """Read what is offered, or have it sent."""
        incoming = self._incoming[offer.tag]
        if incoming.reading is not None or incoming.transfer is not None:
            raise ExchangeError("it offers twice")
        if [length for _, length in offer.runs] != [region.length for region in incoming.regions]:
            log.warning("a peer offers other blocks than those we asked for")
            self._give_up(offer.tag)
        elif self._source is not None:
            targets = [region.address for region in incoming.regions]
            incoming.reading = Reading(self._source, offer.runs, targets)
        else:
            self._have_sent(offer.tag, incoming)

    def _have_sent(self, tag: int, incoming: _Incoming) -> None:
        first = secrets.randbits(TRANSFER_BITS) << ucx_transfer.TAG_BITS
        incoming.transfer = ucx_transfer.receive(self._worker.handle, incoming.regions, first)
        self._check(incoming.transfer)
        self._say(Send(tag, first))

    def _pass(self, frame: Send) -> None:
        outgoing = self._outgoing.get(frame.tag)
        if outgoing is None or outgoing.transfer is not None:
            raise ExchangeError("it wants to be sent what it was not offered")
        outgoing.transfer = ucx_transfer.send(self._endpoint.handle, outgoing.regions, frame.first)
        self._check(outgoing.transfer)

    def _check(self, begun: UcxTransfer) -> None:
        if not begun.ok:
            raise ExchangeError("UCX refuses to move blocks")

    # --- how transfers go on and end ----------------------------------------------------------

    def _read_on(self, tag: int, reading: Reading) -> None:
        try:
            reading.advance()
        except UcpError as exc:
            log.warning("blocks will come through the connection: %s", exc)
            self._stop_reading()
            return
        if reading.done:
            self._say(Moved(tag, ok=True))
            self._received(tag, ok=True)

    def _stop_reading(self) -> None:
        """The other side's memory cannot be read after all; if it is gone, so is the connection."""
        if self._source is not None:
            self._source.close()
            self._source = None
        for tag, incoming in self._incoming.items():
            if incoming.reading is not None:
                incoming.reading = None
                self._have_sent(tag, incoming)

    def _give_up(self, tag: int) -> None:
        self._say(Moved(tag, ok=False))
        self._received(tag, ok=False)

    def _sent(self, tag: int, *, ok: bool) -> None:
        outgoing = self._outgoing.pop(tag)
        if ok and outgoing.transfer is not None:
            self.way = self._endpoint.transports
        self._ended.append(TransferEnded(outgoing.key, ok))

    def _received(self, tag: int, *, ok: bool) -> None:
        incoming = self._incoming.pop(tag)
        if ok:
            reads = incoming.reading is not None
            self.way = "cma" if reads else self._endpoint.transports
        self._ended.append(TransferEnded(incoming.key, ok))
