"""The transport over UCX, by way of UCXX.

Control messages travel on a connection's UCX stream, each after its length in four bytes; blocks
are tagged messages, sent from and received into the KV memory without a copy of ours. The owner's
thread drives UCX: while there is anything to progress it does so, and otherwise it sleeps in epoll
on the worker's event descriptor, so that an idle connection costs nothing.

Endpoints are created with error handling: a peer that dies is noticed (at once while bytes are in
flight, by keep-alive otherwise), and an endpoint can be cut with transfers in flight, which is what
`fence` promises.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libucx
import numpy as np

os.environ.setdefault("UCX_LOG_LEVEL", "error")  # read when the library is loaded
libucx.load_library()

from ucxx._lib import libucxx  # noqa: E402  (it needs the library and the setting above)
from ucxx._lib.arr import Array  # noqa: E402

from diptych_kv_transfer.actions import Address, Peer  # noqa: E402
from diptych_kv_transfer.events import (  # noqa: E402
    Connected,
    ConnectFailed,
    Event,
    PeerLost,
    Received,
    TransferEnded,
)
from diptych_kv_transfer.messages import MAX_MESSAGE_BYTES  # noqa: E402
from diptych_kv_transfer.transport import Buffer  # noqa: E402

log = logging.getLogger(__name__)

OPTIONS = {
    "CMA_MEMORY_INVALIDATE": "y",  # lets endpoints with error handling use cma on one host
    "RNDV_SCHEME": "auto",  # on cma the receiver fetches, on TCP the sender puts
    "PROTOS": "^rndv/am/bcopy,rndv/am/zcopy",  # slower, and never ended when cut in the middle
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_CM_REUSEADDR": "y",  # an engine that was restarted listens where it did before
}
"""A UCX_* variable of the environment wins over these."""

UCP_EP_ATTR_FIELD_TRANSPORTS = 1 << 3
MAX_TRANSPORTS = 16
HEADER_BYTES = 4
DRAIN_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Connection:
    endpoint: Any
    address: Address | None
    incoming: tuple[Any, Buffer]
    """The stream receive that is always posted: a length, or a message of that length."""
    in_header: bool = True
    sends: list[tuple[Any, Buffer]] = field(default_factory=list)
    """Control messages in flight, with their bytes kept alive."""
    transfers: dict[str, list[tuple[Any, Buffer]]] = field(default_factory=dict)
    lost: bool = False


class UcxTransport:
    """See `diptych_kv_transfer.transport.Transport`."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on a port of every address: UCXX offers no choice, so `host` is only for errors.

        Raises `OSError` when the port cannot be had.
        """
        options = {k: v for k, v in OPTIONS.items() if f"UCX_{k}" not in os.environ}
        features = (libucxx.Feature.TAG, libucxx.Feature.STREAM, libucxx.Feature.WAKEUP)
        self._context = libucxx.UCXContext(options, feature_flags=features)
        self._worker = libucxx.UCXWorker(
            self._context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._accepted: list[Any] = []
        try:
            self._listener: Any = libucxx.UCXListener.create(self._worker, port, self._accept)
        except libucxx.UCXError as exc:
            raise OSError(f"cannot listen for KV transfers on {host}:{port}: {exc}") from exc
        self._port = int(self._listener.port)
        self._connections: dict[Peer, _Connection] = {}
        self._next_peer = 0
        self._events: list[Event] = []
        self._name = ""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll = select.epoll()
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
        connection = _Connection(endpoint, address, stream_receive(endpoint, HEADER_BYTES))
        self._connections[peer] = connection

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
        buffer = np.frombuffer(len(data).to_bytes(HEADER_BYTES, "little") + data, np.uint8)
        connection.sends.append((connection.endpoint.stream_send(Array(buffer)), buffer))

    def send_blocks(self, peer: Peer, key: str, tag: int, buffers: Sequence[Buffer]) -> None:
        self._transfer(peer, key, tag, buffers, lambda endpoint: endpoint.tag_send)

    def receive_blocks(self, peer: Peer, key: str, tag: int, buffers: Sequence[Buffer]) -> None:
        self._transfer(peer, key, tag, buffers, lambda endpoint: endpoint.tag_recv)

    def _transfer(
        self,
        peer: Peer,
        key: str,
        tag: int,
        buffers: Sequence[Buffer],
        operation: Callable[[Any], Callable[..., Any]],
    ) -> None:
        connection = self._connections.get(peer)
        if connection is None or connection.lost:
            self._events.append(TransferEnded(key, ok=False))
            return
        move = operation(connection.endpoint)
        connection.transfers[key] = [
            (move(Array(buffer), libucxx.UCXXTag(tag + index)), buffer)
            for index, buffer in enumerate(buffers)
        ]

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
        return not self._worker.progress_once() and bool(self._worker.arm())

    def _collect(self) -> None:
        while self._worker.progress_once():
            pass
        accepted, self._accepted = self._accepted, []
        for endpoint in accepted:
            self._adopt(endpoint, None)
        for peer, connection in list(self._connections.items()):
            self._collect_from(peer, connection)

    def _collect_from(self, peer: Peer, connection: _Connection) -> None:
        self._read(peer, connection)
        connection.sends = [pair for pair in connection.sends if not pair[0].completed]
        for key, requests in list(connection.transfers.items()):
            if all(request.completed for request, _ in requests):
                del connection.transfers[key]
                ok = all(succeeded(request) for request, _ in requests)
                self._events.append(TransferEnded(key, ok))
                # Not before: UCX settles on its transports when the first bytes have moved.
                self._name = transports_of(connection.endpoint) or self._name
        if connection.lost:
            self._bury(peer, connection)

    def _read(self, peer: Peer, connection: _Connection) -> None:
        """Take the control messages that have arrived."""
        while not connection.lost and connection.incoming[0].completed:
            request, buffer = connection.incoming
            if not succeeded(request):
                connection.lost = True
                return
            if connection.in_header:
                length = int.from_bytes(buffer.tobytes(), "little")
                if not 0 < length <= MAX_MESSAGE_BYTES:
                    log.warning("a peer announces a message of %d bytes; cutting it off", length)
                    connection.lost = True
                    return
            else:
                self._events.append(Received(peer, buffer.tobytes()))
                length = HEADER_BYTES
            connection.in_header = not connection.in_header
            connection.incoming = stream_receive(connection.endpoint, length)

    def _bury(self, peer: Peer, connection: _Connection) -> None:
        """Cut a lost connection, wait until UCX has let go of its buffers, and report it."""
        connection.endpoint.close_blocking()
        self._worker.cancel_inflight_requests()
        pending = [request for pairs in connection.transfers.values() for request, _ in pairs]
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while not all(request.completed for request in pending):
            self._worker.progress_once()
            if time.monotonic() > deadline:
                # Its endpoint is destroyed, so nothing can arrive for it any more.
                log.error("UCX did not end a transfer of a connection that was cut")
                break
        del self._connections[peer]
        self._events += [TransferEnded(key, ok=False) for key in connection.transfers]
        self._events.append(PeerLost(peer))

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
        self._epoll.close()
        os.close(self._wake)


def succeeded(request: Any) -> bool:
    """Whether a completed request did what it was for."""
    try:
        request.check_error()
    except libucxx.UCXError:
        return False
    return True


def stream_receive(endpoint: Any, num_bytes: int) -> tuple[Any, Buffer]:
    """Post a receive of exactly so many bytes of an endpoint's stream."""
    buffer = np.empty(num_bytes, np.uint8)
    return endpoint.stream_recv(Array(buffer)), buffer


def transports_of(endpoint: Any) -> str:
    """Which UCX transports an endpoint uses, by `ucp_ep_query`."""
    entries = (_TransportEntry * MAX_TRANSPORTS)()
    attributes = _EndpointAttributes(field_mask=UCP_EP_ATTR_FIELD_TRANSPORTS)
    attributes.transports.entries = entries
    attributes.transports.num_entries = MAX_TRANSPORTS
    attributes.transports.entry_size = ctypes.sizeof(_TransportEntry)
    if _libucp().ucp_ep_query(endpoint.handle, ctypes.byref(attributes)) != 0:
        return ""
    found = entries[: attributes.transports.num_entries]
    return ",".join(sorted({entry.transport.decode() for entry in found if entry.transport}))


class _TransportEntry(ctypes.Structure):
    """`ucp_transport_entry_t`"""

    _fields_ = [("transport", ctypes.c_char_p), ("device", ctypes.c_char_p)]


class _Transports(ctypes.Structure):
    """`ucp_transports_t`"""

    _fields_ = [
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    ]


class _EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t` up to the field that is asked for, and room for what follows."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("transports", _Transports),
        ("padding", ctypes.c_char * 64),
    ]


def _libucp() -> Any:
    library = ctypes.CDLL("libucp.so.0")
    library.ucp_ep_query.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library
