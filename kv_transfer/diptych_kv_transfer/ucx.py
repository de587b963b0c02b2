"""The transport over UCX, by way of UCXX.

Control messages and the frames of transfers travel on a connection's UCX stream; blocks move from
the KV memory and into it without a copy of ours, see `exchange.py`. The owner's thread drives UCX:
while there is anything to progress it does so, and otherwise it sleeps in epoll on the worker's
event descriptor and the sockets, so that an idle connection costs nothing.

Endpoints are created with error handling: a peer that dies is noticed (at once while bytes are in
flight, by keep-alive otherwise), and an endpoint can be cut with transfers in flight, which is what
`fence` promises.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libucx
import msgspec

os.environ.setdefault("UCX_LOG_LEVEL", "error")  # read when the library is loaded
libucx.load_library()

from ucxx._lib import libucxx  # noqa: E402  (it needs the library and the setting above)

from diptych_kv_transfer import frames  # noqa: E402
from diptych_kv_transfer.actions import Address, Peer  # noqa: E402
from diptych_kv_transfer.events import (  # noqa: E402
    Connected,
    ConnectFailed,
    Event,
    PeerLost,
    Received,
    TransferEnded,
)
from diptych_kv_transfer.exchange import Exchange, ExchangeError, Means  # noqa: E402
from diptych_kv_transfer.same_host import is_allowed, this_process  # noqa: E402
from diptych_kv_transfer.sockets import Door  # noqa: E402
from diptych_kv_transfer.stream import FRAME, MESSAGE, Stream, StreamError  # noqa: E402
from diptych_kv_transfer.transport import Buffer  # noqa: E402
from diptych_kv_transfer.ucp import Registry  # noqa: E402

log = logging.getLogger(__name__)

OPTIONS = {
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_CM_REUSEADDR": "y",  # an engine that was restarted listens where it did before
}
"""A UCX_* variable of the environment wins over these."""

DRAIN_TIMEOUT_S = 2.0
RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(slots=True)
class _Connection:
    endpoint: Any
    stream: Stream
    exchange: Exchange
    lost: bool = False


class UcxTransport:
    """See `diptych_kv_transfer.transport.Transport`."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on a port of every address, as UCXX offers no choice; for blocks, on `host` only.

        Raises `OSError` when that cannot be had.
        """
        options = {k: v for k, v in OPTIONS.items() if f"UCX_{k}" not in os.environ}
        rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
        features = [libucxx.Feature.STREAM, libucxx.Feature.WAKEUP]
        if rdma:  # not elsewhere: it lets peers read and write our memory in software
            features.append(libucxx.Feature.RMA)
        self._context = libucxx.UCXContext(options, feature_flags=tuple(features))
        self._worker = libucxx.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._accepted: list[Any] = []
        self._epoll = select.epoll()
        door = Door(host, self._epoll)
        try:
            self._listener: Any = libucxx.UCXListener.create(self._worker, port, self._accept)
        except libucxx.UCXError as exc:
            door.close()
            raise OSError(f"cannot listen for KV transfers on {host}:{port}: {exc}") from exc
        registry = Registry(self._context.handle) if rdma else None
        self._means = Means(this_process(), is_allowed(), door, self._epoll, registry)
        self._port = int(self._listener.port)
        self._connections: dict[Peer, _Connection] = {}
        self._next_peer = 0
        self._events: list[Event] = []
        self._name = ""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closed = False

    @property
    def port(self) -> int:
        return self._port

    @property
    def name(self) -> str:
        return self._name

    # --- connections --------------------------------------------------------------------------

    def _accept(self, request: Any) -> None:
        """Called by UCX while it progresses: an endpoint can only be made afterwards."""
        self._accepted.append(self._listener.create_endpoint_from_conn_request(request, True))

    def _adopt(self, endpoint: Any, address: Address | None) -> None:
        peer = self._next_peer
        self._next_peer += 1
        stream = Stream(endpoint)
        exchange = Exchange(
            endpoint.handle,
            self._means,
            address,
            say=lambda frame: stream.send(FRAME, frames.encode(frame)),
        )
        connection = self._connections[peer] = _Connection(endpoint, stream, exchange)

        def on_close(*_: object) -> None:
            connection.lost = True

        try:
            endpoint.set_close_callback(on_close)
        except RuntimeError:  # it is closed already
            connection.lost = True
        self._events.append(Connected(peer, address))

    def connect(self, address: Address) -> None:
        try:
            endpoint = self._worker.create_endpoint_from_hostname(*address, True)
        except (libucxx.UCXError, OSError, ValueError, OverflowError) as exc:
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

    def send_blocks(self, peer: Peer, key: str, tag: int, buffers: Sequence[Buffer]) -> None:
        exchange = self._exchange_with(peer, key)
        if exchange is not None:
            exchange.send(key, tag, buffers)

    def receive_blocks(self, peer: Peer, key: str, tag: int, buffers: Sequence[Buffer]) -> None:
        exchange = self._exchange_with(peer, key)
        if exchange is not None:
            exchange.receive(key, tag, buffers)

    def _exchange_with(self, peer: Peer, key: str) -> Exchange | None:
        """Where a transfer is to take place; it has failed if its connection is lost."""
        connection = self._connections.get(peer)
        if connection is None or connection.lost:
            self._events.append(TransferEnded(key, ok=False))
            return None
        return connection.exchange

    # --- progress -----------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> list[Event]:
        self._collect()
        if not self._events and self._sleepy():
            for descriptor, _ in self._epoll.poll(timeout_s):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
            self._collect()
        events, self._events = self._events, []
        return events

    def _sleepy(self) -> bool:
        """Nothing is left to progress, and the event descriptor is armed."""
        if any(connection.exchange.busy for connection in self._connections.values()):
            return False
        return not self._worker.progress_once() and bool(self._worker.arm())

    def _collect(self) -> None:
        while self._worker.progress_once():
            pass
        self._means.door.advance()
        accepted, self._accepted = self._accepted, []
        for endpoint in accepted:
            self._adopt(endpoint, None)
        for peer, connection in list(self._connections.items()):
            self._collect_from(peer, connection)

    def _collect_from(self, peer: Peer, connection: _Connection) -> None:
        if not connection.lost:
            try:
                self._take(peer, connection)
            except (StreamError, ExchangeError, msgspec.MsgspecError) as exc:
                log.info("cutting a connection: %s", exc)
                connection.lost = True
        if connection.lost:
            self._bury(peer, connection)

    def _take(self, peer: Peer, connection: _Connection) -> None:
        """Take what has arrived, and go on with what is under way."""
        exchange = connection.exchange
        while (message := connection.stream.next_message()) is not None:
            kind, data = message
            if kind == MESSAGE:
                self._events.append(Received(peer, data))
            else:
                exchange.handle(frames.decode(data))
        ended = exchange.advance()
        self._events += ended
        if any(transfer.ok for transfer in ended):
            self._name = exchange.way

    def _bury(self, peer: Peer, connection: _Connection) -> None:
        """Cut a lost connection, wait until UCX has let go of its buffers, and report it."""
        puts = connection.exchange.abandon()
        connection.endpoint.close_blocking()
        self._worker.cancel_inflight_requests()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while not all(put.ended for put in puts):
            self._worker.progress_once()
            if time.monotonic() > deadline:
                # Its endpoint is destroyed, so nothing can be sent for it any more.
                log.error("UCX did not end a transfer of a connection that was cut")
                break
        for put in filter(lambda put: put.ended, puts):
            put.free()
        del self._connections[peer]
        self._events += [*connection.exchange.take_ended(), PeerLost(peer)]

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer, connection in list(self._connections.items()):
            self._bury(peer, connection)
        self._listener = None  # UCXX stops listening when nobody holds it
        self._worker.progress()
        self._means.door.close()
        if self._means.registry is not None:
            self._means.registry.close()
        self._epoll.close()
        os.close(self._wake)
