"""The transfers of one connection: which side moves the bytes, how, and when that is over.

The receiver decides. It reads the sender's memory if that is a process of its host; with RDMA it
has the sender write into its own; else the bytes come through a socket. None of these needs more
than a message before and one after, however many runs there are. `frames.py` shows the messages.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych_kv_transfer.actions import Address
from diptych_kv_transfer.events import TransferEnded
from diptych_kv_transfer.frames import AnyFrame, Introduction, Moved, Offer, Process, PutInto
from diptych_kv_transfer.same_host import Reading, address_of, can_read
from diptych_kv_transfer.sockets import TAG_BYTES, Door, Receiver, Sender
from diptych_kv_transfer.transport import Buffer
from diptych_kv_transfer.ucp import Put, Registry, UcpError, transports_of

log = logging.getLogger(__name__)

MAX_UNCLAIMED_OFFERS = 4096
"""More come only from a peer that means harm."""


class ExchangeError(Exception):
    """The peer broke the protocol of transfers; it is to be cut off."""


BY_SOCKET = frozenset({"cma", "posix", "self", "sysv", "tcp"})
"""UCX transports whose blocks go through our socket: UCX can cut off no writer over TCP."""


@dataclass(frozen=True, slots=True)
class Means:
    """What all connections of a transport move blocks with."""

    me: Process
    may_read: bool
    """Whether memory of processes on our host may be read."""
    door: Door
    epoll: select.epoll
    registry: Registry | None
    """For UCX's one-sided writes; None: there is no hardware that would do them."""


@dataclass(slots=True)
class _Outgoing:
    key: str
    buffers: Sequence[Buffer]
    put: Put | None = None
    asked: bool = False
    """It goes or waits to go through the socket."""


@dataclass(slots=True)
class _Incoming:
    key: str
    buffers: Sequence[Buffer]
    reading: Reading | None = None


class Exchange:
    """Sends and receives of blocks over one connection."""

    def __init__(
        self,
        endpoint: int,
        means: Means,
        address: Address | None,
        say: Callable[[AnyFrame], None],
    ) -> None:
        """Introduce ourselves.

        Args:
            endpoint: handle of a UCP endpoint.
            address: whom we connected to; None: they connected to us, and will only receive.
            say: sends a frame to the other side, in order.
        """
        self._endpoint = endpoint
        self._means = means
        self._address = address
        self._say = say
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._offers: dict[int, Offer] = {}
        """Not asked for yet."""
        self._readable: int | None = None
        """The other side's pid, if we may read its memory."""
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._ended: list[TransferEnded] = []
        self.way = ""
        """How the last blocks went, for example `cma` or `tcp`."""
        self.busy = False
        """`advance` can go on at once, whatever the network does."""
        self._token = means.door.expect(self._let_in)
        say(Introduction(means.me, means.door.port, self._token))

    def _let_in(self, sender: Sender) -> None:
        self._sender = sender

    # --- what the owner asks ------------------------------------------------------------------

    def send(self, key: str, tag: int, buffers: Sequence[Buffer]) -> None:
        """Offer buffers to the other side."""
        self._outgoing[tag] = _Outgoing(key, buffers)
        runs = [(address_of(buffer), buffer.nbytes) for buffer in buffers]
        self._say(Offer(tag, runs))

    def receive(self, key: str, tag: int, buffers: Sequence[Buffer]) -> None:
        """Have what is or will be offered under a tag moved into buffers."""
        self._incoming[tag] = _Incoming(key, buffers)
        offer = self._offers.pop(tag, None)
        if offer is not None:
            self._begin(offer)

    def advance(self) -> list[TransferEnded]:
        """Go on with what is under way; what has ended since the last call.

        Raises `ExchangeError` when the other side is to be cut off.
        """
        try:
            self.busy = self._use_socket()
        except OSError as exc:
            raise ExchangeError(f"the socket for blocks is broken: {exc}") from exc
        for tag, incoming in list(self._incoming.items()):
            if incoming.reading is not None:
                self._read_on(tag, incoming.reading)
        for tag, outgoing in list(self._outgoing.items()):
            if outgoing.put is not None:
                self._put_on(tag, outgoing.put)
        return self.take_ended()

    def take_ended(self) -> list[TransferEnded]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def abandon(self) -> list[Put]:
        """The connection is gone: every transfer has ended, as `take_ended` will say.

        Returns the writes that may still read our memory, to be freed when they have ended.
        """
        puts = [outgoing.put for outgoing in self._outgoing.values() if outgoing.put is not None]
        self._means.door.forget(self._token)
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()
        for tag in list(self._outgoing):
            self._sent(tag, ok=False)
        for tag in list(self._incoming):
            self._received(tag, ok=False)
        return puts

    # --- what the other side says -------------------------------------------------------------

    def handle(self, frame: AnyFrame) -> None:
        """Act on a frame. Raises `ExchangeError` when it should not have been sent."""
        match frame:
            case Introduction():
                self._meet(frame)
            case Offer(tag) if tag in self._incoming:
                self._begin(frame)
            case Offer(tag):
                if len(self._offers) >= MAX_UNCLAIMED_OFFERS:
                    raise ExchangeError("too many offers of blocks that nobody asked for")
                self._offers[tag] = frame
            case PutInto():
                self._put(frame)
            case Moved(tag, ok) if tag in self._outgoing:
                if self._outgoing[tag].put is not None or self._outgoing[tag].asked:
                    raise ExchangeError("it says that it has read what it has us send")
                self.way = "cma"
                self._sent(tag, ok=ok)
            case Moved(tag, ok):
                incoming = self._incoming.get(tag)
                if incoming is None or incoming.reading is not None or not self._by_ucx():
                    raise ExchangeError("it says that it has written what nobody asked for")
                self.way = transports_of(self._endpoint)
                self._received(tag, ok=ok)

    def _meet(self, other: Introduction) -> None:
        """Choose how blocks will come from the other side."""
        if self._means.may_read and can_read(other.process, self._means.me):
            self._readable = other.process.pid
        elif self._address is not None and not self._by_ucx() and self._receiver is None:
            address = (self._address[0], other.port)
            try:
                self._receiver = Receiver(address, other.token, self._means.epoll)
            except OSError as exc:
                raise ExchangeError(f"cannot connect for blocks: {exc}") from exc

    def _by_ucx(self) -> bool:
        """Whether UCX has something better than TCP between us."""
        if self._means.registry is None:
            return False
        return not BY_SOCKET.issuperset(transports_of(self._endpoint).split(","))

    def _begin(self, offer: Offer) -> None:
        """Move what is offered, or have it moved."""
        incoming = self._incoming[offer.tag]
        buffers = incoming.buffers
        if [length for _, length in offer.runs] != [buffer.nbytes for buffer in buffers]:
            log.warning("a peer offers other blocks than those we asked for")
            self._give_up(offer.tag)
        elif self._readable is not None:
            ours = [address_of(buffer) for buffer in buffers]
            incoming.reading = Reading(self._readable, offer.runs, ours)
            self.busy = True
        elif self._receiver is not None:
            self._receiver.ask(offer.tag, buffers)
            self.busy = True
        elif self._means.registry is not None and self._by_ucx():
            try:
                self._say(put_into(offer.tag, buffers, self._means.registry))
            except UcpError as exc:
                log.warning("cannot have blocks written to us: %s", exc)
                self._give_up(offer.tag)
        else:
            log.warning("no way to fetch blocks from a peer that connected to us")
            self._give_up(offer.tag)

    def _put(self, frame: PutInto) -> None:
        outgoing = self._outgoing.get(frame.tag)
        if outgoing is None or outgoing.asked or outgoing.put is not None:
            raise ExchangeError("it wants to be written what it was not offered")
        wrong_key = any(key >= len(frame.keys) for _, key in frame.targets)
        if wrong_key or len(frame.targets) != len(outgoing.buffers):
            raise ExchangeError("it does not say where all runs are to go")
        sources = [(address_of(buffer), buffer.nbytes) for buffer in outgoing.buffers]
        outgoing.put = Put(self._endpoint, sources, frame.targets, frame.keys)

    # --- how transfers go on and end ----------------------------------------------------------

    def _use_socket(self) -> bool:
        """Send and receive what can be; True: there is more at once."""
        more = False
        if self._receiver is not None:
            more = self._receiver.advance()
            for tag in self._receiver.queue.take_finished():
                self.way = "tcp"
                self._received(tag, ok=True)
        if self._sender is not None:
            while (tag_bytes := self._sender.hear(TAG_BYTES)) is not None:
                self._answer(self._sender, int.from_bytes(tag_bytes, "little"))
            more |= self._sender.advance()
            for tag in self._sender.queue.take_finished():
                self.way = "tcp"
                self._sent(tag, ok=True)
        return more

    def _answer(self, sender: Sender, tag: int) -> None:
        outgoing = self._outgoing.get(tag)
        if outgoing is None or outgoing.asked or outgoing.put is not None:
            raise ExchangeError("it asks for what it was not offered")
        outgoing.asked = True
        sender.queue.add(tag, outgoing.buffers)

    def _read_on(self, tag: int, reading: Reading) -> None:
        try:
            reading.advance()
        except OSError as exc:
            log.warning("cannot read the blocks of another process: %s", exc)
            self._give_up(tag)
            return
        if not reading.done:
            self.busy = True
            return
        self.way = "cma"
        self._say(Moved(tag, ok=True))
        self._received(tag, ok=True)

    def _put_on(self, tag: int, put: Put) -> None:
        if put.done and put.ended:
            self.way = transports_of(self._endpoint)
            self._say(Moved(tag, put.ok))
            self._sent(tag, ok=put.ok)
            put.free()

    def _give_up(self, tag: int) -> None:
        self._say(Moved(tag, ok=False))
        self._received(tag, ok=False)

    def _sent(self, tag: int, *, ok: bool) -> None:
        self._ended.append(TransferEnded(self._outgoing.pop(tag).key, ok))

    def _received(self, tag: int, *, ok: bool) -> None:
        self._ended.append(TransferEnded(self._incoming.pop(tag).key, ok))


def put_into(tag: int, buffers: Sequence[Buffer], registry: Registry) -> PutInto:
    """Where buffers are, for a peer that is to write to them."""
    keys = [registry.key_of(buffer) for buffer in buffers]
    distinct = list(dict.fromkeys(keys))
    targets = [
        (address_of(buffer), distinct.index(key)) for buffer, key in zip(buffers, keys, strict=True)
    ]
    return PutInto(tag, targets, distinct)
