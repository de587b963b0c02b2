"""The transport over UCX.

Control messages and the frames of transfers travel on a connection's UCX stream; blocks move from
the KV memory and into it without a copy of ours, see `exchange.py`. The owner's thread drives UCX:
while there is anything to progress it does so, and otherwise it sleeps in epoll on the worker's
event descriptor, so that an idle connection costs nothing. A connection is not reported before both
sides have proven that they belong to one service: see `handshake.py`.

Endpoints are created with error handling: a peer that dies is noticed (at once while bytes are in
flight, by keep-alive otherwise), and an endpoint can be cut with transfers in flight, which is what
`fence` promises.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import select
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from diptych_kv_transfer.memory.shard import MemoryKind, MemoryRegion
from diptych_kv_transfer.signing.handshake import NONCE_BYTES, AuthenticationError, Handshake
from diptych_kv_transfer.signing.references import HingeKey
from diptych_kv_transfer.tables.actions import (
    Address,
    Connected,
    ConnectFailed,
    Event,
    Peer,
    PeerLost,
    Received,
    TransferEnded,
)
from diptych_kv_transfer.transports.ucx import frames, libucp
from diptych_kv_transfer.transports.ucx.exchange import Exchange, ExchangeError
from diptych_kv_transfer.transports.ucx.libucp import UcpError
from diptych_kv_transfer.transports.ucx.loiterers import LOOK_S, Loiterers
from diptych_kv_transfer.transports.ucx.requests import drop_unexpected
from diptych_kv_transfer.transports.ucx.same_host import SameHost, may_read, network_transports
from diptych_kv_transfer.transports.ucx.stream import FRAME, HANDSHAKE, MESSAGE, Stream, StreamError
from diptych_kv_transfer.transports.ucx.ucx_transfer import PIECE_BYTES, UcxTransfer
from diptych_kv_transfer.transports.ucx.worker import (
    Context,
    Endpoint,
    Listener,
    Worker,
    as_limited,
)
from diptych_protocol import UNREADABLE

log = logging.getLogger(__name__)

SEGMENT_BYTES = PIECE_BYTES + (64 << 10)
"""The size of a segment, with room for UCX's headers."""
OPTIONS = {
    "KEEPALIVE_INTERVAL": "1s",
    "RNDV_THRESH": str(PIECE_BYTES + 1),  # no piece waits until its receiver has answered,
    "TCP_TX_SEG_SIZE": str(SEGMENT_BYTES),  # and each is sent whole
    "TCP_RX_SEG_SIZE": str(SEGMENT_BYTES),
    "TCP_CM_REUSEADDR": "y",  # an engine that was restarted listens where it did before
}
"""UCX's options. A UCX_* variable of the environment has precedence."""
LOOPBACK_ONLY = {"NET_DEVICES": "lo"}
"""Without this, UCX opens a port for blocks on each network device that it may use."""
FEATURES = libucp.FEATURE_TAG | libucp.FEATURE_STREAM | libucp.FEATURE_WAKEUP

DRAIN_TIMEOUT_S = 2.0
HANDSHAKE_TIMEOUT_S = 20.0
"""A peer that has not proven itself within this time is disconnected."""
MEETING_TIMEOUT_S = 2.0
MAX_PROGRESS = 256
"""UCX's steps between two looks at what arrived, so that a busy peer is noticed."""
MAX_STRANGERS = 64
"""Limit on peers that have connected and not proven themselves. Beyond it the oldest is
disconnected. An engine of the service needs one round trip to prove itself."""


@dataclass(slots=True)
class _Connection:
    endpoint: Endpoint
    stream: Stream
    handshake: Handshake
    prove_by: float
    address: Address | None
    """The address that we connected to; None if the peer connected to us."""
    caller: Address | None
    """The address that the peer connected from; None if we connected to it."""
    exchange: Exchange | None = None
    """Set once the peer has proven itself."""
    lost: bool = False
    reason: str = ""
    """Why it was cut, unless its owner cut it."""

    @property
    def is_stranger(self) -> bool:
        """They connected to us, and have not proven themselves."""
        return self.address is None and self.exchange is None and not self.lost

    def cut(self, reason: Exception | str) -> None:
        log.info("cutting a connection: %s", reason)
        self.lost, self.reason = True, str(reason)


class UcxTransport:
    """See `diptych_kv_transfer.transports.Transport`."""

    reaches: ClassVar = frozenset({MemoryKind.HOST})
    """UCX can be built for a device's memory too, but that was never tried here."""

    def __init__(self, host: str, port: int, key: HingeKey) -> None:
        """Listen at an IP address. A loopback address serves processes of this host only.

        key: the key that the other side of each connection must have, too.

        Raises `OSError` when the port is not available, or UCX_TLS names nothing that can listen.
        """
        wanted = OPTIONS | (LOOPBACK_ONLY if ipaddress.ip_address(host).is_loopback else {})
        options = {k: v for k, v in wanted.items() if f"UCX_{k}" not in os.environ}
        options["TLS"] = network_transports()
        with contextlib.ExitStack() as undo:
            try:
                self._context = Context(options, FEATURES)
                undo.callback(self._context.close)
                self._worker = Worker(self._context)
                undo.callback(self._worker.close)
                self._listener = Listener(self._worker, host, port)
                undo.callback(self._listener.close)
                descriptor = self._worker.descriptor
            except (UcpError, OSError) as exc:
                raise OSError(f"cannot listen for KV transfers on {host}:{port}: {exc}") from exc
            undo.pop_all()
        self._key, self.port = key, self._listener.port
        self._loiterers = Loiterers(self.port, HANDSHAKE_TIMEOUT_S, MAX_STRANGERS)
        self._look_at = 0.0
        """When to look for them next."""
        self._same_host = open_same_host()
        self._connections: dict[Peer, _Connection] = {}
        self._not_ended: list[tuple[Stream, list[UcxTransfer]]] = []
        """What UCX has not let go of when it should have: its memory is kept."""
        self._next_peer = 0
        self._events: list[Event] = []
        self.name = ""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(descriptor, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closed = False
        self.unreachable = self._meet_itself(host)
        """Why it cannot connect to itself; empty: it can."""

    def _meet_itself(self, host: str) -> str:
        """Make a connection and cut it. UCX sets much up for its first one, which would keep the
        first rejection waiting: it took 117 to 253 ms, and takes 48 to 105 ms after this."""
        self.connect((host, self.port))
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        ends, failure = 0, ""
        while ends < 2 and not failure:
            left = deadline - time.monotonic()
            events = self.poll(left) if left > 0 else [ConnectFailed((host, self.port), "too slow")]
            for event in events:
                ends += isinstance(event, Connected)
                if isinstance(event, ConnectFailed):
                    failure = event.reason
                    log.warning("cannot connect to itself%s: %s", as_limited(), failure)
        for peer in list(self._connections):
            self.fence(peer)
        self._collect()
        self._events.clear()
        return failure

    # --- connections --------------------------------------------------------------------------

    def _accept(self) -> None:
        """Take the connections that others have asked for."""
        for request in self._listener.take_requests():
            try:
                endpoint = self._worker.accept(request)
            except UcpError as exc:  # they may be gone already
                log.info("cannot accept a connection: %s", exc)
            else:
                self._adopt(endpoint, None)

    def _adopt(self, endpoint: Endpoint, address: Address | None) -> None:
        peer = self._next_peer
        self._next_peer += 1
        handshake = Handshake(
            self._key, secrets.token_bytes(NONCE_BYTES), connects=address is not None
        )
        prove_by = time.monotonic() + HANDSHAKE_TIMEOUT_S
        caller = None if address is not None else endpoint.caller
        connection = _Connection(endpoint, Stream(endpoint), handshake, prove_by, address, caller)
        self._connections[peer] = connection
        if address is None and caller is None:  # it could not be told from a loiterer
            connection.cut("UCX does not say who has connected")
        if handshake.opening:
            connection.stream.shake(handshake.opening)
        strangers = [x for x in self._connections.values() if x.is_stranger]
        if len(strangers) > MAX_STRANGERS:
            strangers[0].cut("too many have connected that prove nothing")

    def _shake(self, peer: Peer, connection: _Connection, data: bytes) -> None:
        """Go on with the handshake; when it is over, the connection is its owner's."""
        handshake, stream = connection.handshake, connection.stream
        answer = handshake.receive(data)
        if answer:
            stream.shake(answer)
        if handshake.session is None:
            return
        stream.session = handshake.session
        connection.exchange = Exchange(
            connection.endpoint,
            self._worker,
            self._same_host,
            say=lambda frame: stream.send(FRAME, frames.encode(frame)),
            accepted=connection.address is None,
        )
        self._events.append(Connected(peer, connection.address))

    def connect(self, address: Address) -> None:
        try:
            endpoint = self._worker.connect(*address)
        except (UcpError, OSError) as exc:
            self._events.append(ConnectFailed(address, str(exc)))
            return
        self._adopt(endpoint, address)

    def fence(self, peer: Peer) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.lost = True

    # --- bytes --------------------------------------------------------------------------------

    def send(self, peer: Peer, data: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is None or connection.lost:
            return
        connection.stream.send(MESSAGE, data)

    def send_blocks(
        self, peer: Peer, key: Hashable, tag: int, regions: Sequence[MemoryRegion]
    ) -> None:
        exchange = self._exchange_of(peer)
        if exchange is None:
            self._events.append(TransferEnded(key, ok=False))
            return
        try:
            exchange.send(key, tag, regions)
        except ExchangeError as exc:
            self._events.append(TransferEnded(key, ok=False))
            self._connections[peer].cut(exc)

    def receive_blocks(
        self, peer: Peer, key: Hashable, tag: int, regions: Sequence[MemoryRegion]
    ) -> None:
        exchange = self._exchange_of(peer)
        if exchange is None:
            self._events.append(TransferEnded(key, ok=False))
            return
        try:
            exchange.receive(key, tag, regions)
        except ExchangeError as exc:  # each load hears of it, as of any lost connection
            self._connections[peer].cut(exc)

    def _exchange_of(self, peer: Peer) -> Exchange | None:
        """None: the connection is not there, or not any more."""
        connection = self._connections.get(peer)
        return None if connection is None or connection.lost else connection.exchange

    # --- progress -----------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> list[Event]:
        self._collect()
        if not self._events and self._sleepy():
            for descriptor, _ in self._epoll.poll(self._patience(timeout_s)):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
            self._collect()
        events, self._events = self._events, []
        return events

    def _patience(self, timeout_s: float | None) -> float | None:
        """The same, or until somebody should have proven itself, or is looked for."""
        waiting = [x.prove_by for x in self._connections.values() if x.exchange is None]
        left = max(0.0, min([self._look_at, *waiting]) - time.monotonic())
        return left if timeout_s is None else min(left, timeout_s)

    def _sleepy(self) -> bool:
        """Nothing is left to send or to progress, and the event descriptor is armed."""
        for connection in self._connections.values():
            exchange = connection.exchange
            busy = exchange is not None and exchange.busy
            if connection.lost or busy or connection.stream.pending:
                return False
        return not self._worker.progress() and self._worker.arm()

    def _collect(self) -> None:
        for connection in self._connections.values():
            if connection.lost:
                continue
            try:
                connection.stream.flush()
            except StreamError as exc:
                connection.cut(exc)
        for _ in range(MAX_PROGRESS):
            if not self._worker.progress():
                break
        drop_unexpected(self._worker.handle)
        self._accept()
        if (now := time.monotonic()) >= self._look_at:
            known = {x.caller for x in self._connections.values() if x.caller is not None}
            self._loiterers.cut_off(known, now)
            self._look_at = now + LOOK_S
        for peer, connection in list(self._connections.items()):
            self._collect_from(peer, connection)

    def _collect_from(self, peer: Peer, connection: _Connection) -> None:
        status = connection.endpoint.status
        if status != libucp.OK and not connection.lost:
            connection.cut(f"UCX has found it broken (status {status})")
        if not connection.lost:
            try:
                self._take(peer, connection)
            except (
                StreamError, AuthenticationError, ExchangeError, *UNREADABLE
            ) as exc:  # fmt: skip
                connection.cut(exc)
        if connection.lost:
            self._bury(peer, connection)

    def _take(self, peer: Peer, connection: _Connection) -> None:
        """Take what has arrived, and go on with what is under way."""
        while (message := connection.stream.next_message()) is not None:
            kind, data = message
            if kind == HANDSHAKE:
                self._shake(peer, connection, data)
            elif kind == MESSAGE:
                self._events.append(Received(peer, data))
            elif connection.exchange is not None:
                connection.exchange.handle(frames.decode(data))
        exchange = connection.exchange
        if exchange is None:
            if connection.prove_by <= time.monotonic():
                connection.cut("the other side has not proven who it is in time")
            return
        ended = exchange.advance()
        self._events += ended
        if any(transfer.ok for transfer in ended):
            self.name = exchange.way

    def _bury(self, peer: Peer, connection: _Connection) -> None:
        """Cut a lost connection, wait until UCX has let go of its buffers, and report it."""
        exchange = connection.exchange
        transfers = [] if exchange is None else exchange.abandon()
        try:
            connection.endpoint.close()
        except UcpError as exc:
            log.error("%s", exc)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        stream = connection.stream
        while (transfers := [x for x in transfers if not x.ended]) or not stream.ended:
            self._worker.progress()
            if time.monotonic() > deadline:
                # Its endpoint is destroyed, so nothing can be sent for it any more.
                log.error("UCX did not end a transfer of a connection that was cut")
                self._not_ended.append((stream, transfers))
                break
        del self._connections[peer]
        if exchange is not None:
            self._events += [*exchange.take_ended(), PeerLost(peer)]
        elif connection.address is not None:
            self._events.append(ConnectFailed(connection.address, connection.reason))

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._accept()
        for peer, connection in list(self._connections.items()):
            self._bury(peer, connection)
        self._listener.close()
        self._worker.close()
        self._context.close()
        if self._same_host is not None:
            self._same_host.close()
        self._epoll.close()
        os.close(self._wake)


def open_same_host() -> SameHost | None:
    """Return how processes of this host read each other; None if UCX_TLS or UCX forbids it."""
    if not may_read():
        return None
    try:
        return SameHost()
    except UcpError as exc:
        log.warning("blocks will go through connections on this host, too: %s", exc)
        return None
