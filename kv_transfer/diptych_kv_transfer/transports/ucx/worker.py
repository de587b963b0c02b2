"""UCX's contexts, workers, listeners and endpoints, each with one owner that closes it.

A worker and what belongs to it serve one thread at a time. Endpoints have error handling: UCX
notices a peer that died, and an endpoint can be closed with requests in flight.
"""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import os
import socket
import sys
import time
from collections.abc import Mapping
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Final

from diptych_kv_transfer.transports.ucx import libucp
from diptych_kv_transfer.transports.ucx.libucp import UcpError, check, lib, lib_without_lock

CLOSE_TIMEOUT_S: Final = 2.0
LIMITS: Final = ("UCX_TLS", "UCX_NET_DEVICES")
"""Variables of the environment that say what UCX may use."""
MAX_TRANSPORTS: Final = 16
MAX_PORT: Final = 65535
_FORCE = libucp.RequestParam(
    op_attr_mask=libucp.OP_ATTR_FIELD_FLAGS, flags=libucp.EP_CLOSE_FLAG_FORCE
)


def as_limited() -> str:
    """Return what limits UCX, and the remedy, for an error; empty if nothing does."""
    found = " ".join(f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ)
    remedy = "name what this machine has, or unset it; spec.transfer.transport sets UCX_TLS"
    return f" with {found} ({remedy})" if found else ""


class Context:
    """A UCX context: UCX with one set of options and features."""

    def __init__(self, options: Mapping[str, str], features: int) -> None:
        """Options are named as UCX's environment variables, without `UCX_`; those variables have
        precedence. `features` are libucp's FEATURE_ flags. Raises `UcpError`."""
        config, handle = c_void_p(), c_void_p()
        check(lib.ucp_config_read(None, None, byref(config)), "reading UCX's configuration")
        try:
            for name, value in options.items():
                status = lib.ucp_config_modify(config, name.encode(), value.encode())
                check(status, f"setting UCX_{name} to {value!r}")
            params = libucp.Params(field_mask=libucp.PARAM_FIELD_FEATURES, features=features)
            status = lib.ucp_init_version(*libucp.API_VERSION, byref(params), config, byref(handle))
            check(status, f"initialising UCX{as_limited()}")
        finally:
            lib.ucp_config_release(config)
        self.handle = handle.value or 0

    def close(self) -> None:
        """Close it. Call this once, after its workers are closed."""
        lib.ucp_cleanup(self.handle)


class Worker:
    """A UCX worker, to which connections and requests belong."""

    def __init__(self, context: Context) -> None:
        """Raises `UcpError`."""
        params = libucp.WorkerParams(
            field_mask=libucp.WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode=libucp.THREAD_MODE_SERIALIZED,
        )
        handle = c_void_p()
        check(lib.ucp_worker_create(context.handle, byref(params), byref(handle)), "a worker")
        self.handle = handle.value or 0
        self._endpoints: dict[int, Endpoint] = {}
        self._numbers = itertools.count(1)
        self._on_error = libucp.ErrorCallback(self._note_error)

    @property
    def descriptor(self) -> int:
        """A file descriptor that is readable when there may be something to progress, once the
        worker is armed.

        The context needs FEATURE_WAKEUP, or this raises `UcpError`.
        """
        descriptor = c_int()
        check(lib.ucp_worker_get_efd(self.handle, byref(descriptor)), "an event descriptor")
        return descriptor.value

    @property
    def address(self) -> bytes:
        """The address that `reach` of another worker takes."""
        address, length = c_void_p(), c_size_t()
        status = lib.ucp_worker_get_address(self.handle, byref(address), byref(length))
        check(status, "a worker's address")
        try:
            return ctypes.string_at(address, length.value)
        finally:
            lib.ucp_worker_release_address(self.handle, address)

    def progress(self) -> bool:
        """Do one step of the running operations; False if there was nothing to do."""
        return bool(lib_without_lock.ucp_worker_progress(self.handle))

    def arm(self) -> bool:
        """Make the descriptor report the next event. False: there is one already."""
        status = lib.ucp_worker_arm(self.handle)
        if status != libucp.ERR_BUSY:
            check(status, "arming a worker")
        return bool(status == libucp.OK)

    def connect(self, host: str, port: int) -> Endpoint:
        """Begin to connect to a listener at an IP address. Raises `UcpError` and `OSError`."""
        address = sockaddr(host, port)
        return self._create(
            libucp.EP_PARAM_FIELD_SOCK_ADDR,
            libucp.EP_PARAMS_FLAGS_CLIENT_SERVER,
            sockaddr=libucp.SockAddr(address, len(address)),
        )

    def accept(self, request: int) -> Endpoint:
        """Return the endpoint for a listener's connection request. Raises `UcpError`."""
        return self._create(
            libucp.EP_PARAM_FIELD_CONN_REQUEST,
            libucp.EP_PARAMS_FLAGS_NO_LOOPBACK,
            conn_request=request,
        )

    def reach(self, address: bytes) -> Endpoint:
        """Return an endpoint for another worker's `address`. Raises `UcpError`."""
        return self._create(libucp.EP_PARAM_FIELD_REMOTE_ADDRESS, 0, address=address)

    def _create(self, field: int, flags: int, **destination: object) -> Endpoint:
        number, handle = next(self._numbers), c_void_p()
        params = libucp.EndpointParams(
            field_mask=(
                field
                | libucp.EP_PARAM_FIELD_FLAGS
                | libucp.EP_PARAM_FIELD_ERR_HANDLING_MODE
                | libucp.EP_PARAM_FIELD_ERR_HANDLER
            ),
            flags=flags,
            err_mode=libucp.ERR_HANDLING_MODE_PEER,
            err_handler=libucp.ErrorHandler(self._on_error, number),
            **destination,
        )
        endpoint = self._endpoints[number] = Endpoint(self, number)
        status = lib.ucp_ep_create(self.handle, byref(params), byref(handle))
        if status != libucp.OK:
            del self._endpoints[number]
        check(status, "an endpoint")
        endpoint.handle = handle.value or 0
        return endpoint

    def _note_error(self, number: int, _handle: int, status: int) -> None:
        """UCX calls this while it progresses."""
        endpoint = self._endpoints.get(number)
        if endpoint is not None:
            endpoint.status = status

    def forget(self, number: int) -> None:
        """Forget an endpoint that has been closed."""
        self._endpoints.pop(number, None)

    def close(self) -> None:
        """Close it. Call this once, after its endpoints and listeners are closed."""
        lib.ucp_worker_destroy(self.handle)


class Endpoint:
    """One side of a connection."""

    def __init__(self, worker: Worker, number: int) -> None:
        """Only `Worker`, which makes the handle, calls this."""
        self.handle = 0
        self.status = libucp.OK
        """Something else once UCX has found the connection broken."""
        self._worker = worker
        self._number = number

    def close(self) -> None:
        """Cut the connection. Call this once.

        All its requests end soon, and UCX touches their memory until then. Each has to be freed.
        Raises `UcpError` if UCX does not close it in time.
        """
        request = lib.ucp_ep_close_nbx(self.handle, byref(_FORCE))
        self._worker.forget(self._number)
        if libucp.status_in(request) is not None:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while lib.ucp_request_check_status(request) == libucp.IN_PROGRESS:
            if time.monotonic() > deadline:
                raise UcpError("UCX does not close an endpoint")
            self._worker.progress()
        lib.ucp_request_free(request)

    @property
    def caller(self) -> tuple[str, int] | None:
        """Return the IPv4 address and port that an accepted connection came from; None if UCX does
        not know."""
        attributes = libucp.EndpointAttributes(field_mask=libucp.EP_ATTR_FIELD_REMOTE_SOCKADDR)
        if lib.ucp_ep_query(self.handle, byref(attributes)) != libucp.OK:
            return None
        address = bytes(attributes.remote_sockaddr)
        return socket.inet_ntoa(address[4:8]), int.from_bytes(address[2:4], "big")

    @property
    def transports(self) -> str:
        """Return the UCX transports that it uses, with commas; empty if UCX does not know."""
        entries = (libucp.TransportEntry * MAX_TRANSPORTS)()
        attributes = libucp.EndpointAttributes(
            field_mask=libucp.EP_ATTR_FIELD_TRANSPORTS,
            transports=libucp.Transports(
                entries, MAX_TRANSPORTS, ctypes.sizeof(libucp.TransportEntry)
            ),
        )
        if lib.ucp_ep_query(self.handle, byref(attributes)) != libucp.OK:
            return ""
        found = entries[: attributes.transports.num_entries]
        names = {entry.transport_name.decode() for entry in found if entry.transport_name}
        return ",".join(sorted(names))


class Listener:
    """Accepts connections at one address."""

    def __init__(self, worker: Worker, host: str, port: int) -> None:
        """Listen at an IP address; port 0 takes a free one. Raises `UcpError` and `OSError`."""
        self._requests: list[int] = []
        self._on_request = libucp.ConnectionCallback(self._note_request)
        address, handle = sockaddr(host, port), c_void_p()
        params = libucp.ListenerParams(
            field_mask=(
                libucp.LISTENER_PARAM_FIELD_SOCK_ADDR | libucp.LISTENER_PARAM_FIELD_CONN_HANDLER
            ),
            sockaddr=libucp.SockAddr(address, len(address)),
            conn_handler=libucp.ConnectionHandler(self._on_request, None),
        )
        check(lib.ucp_listener_create(worker.handle, byref(params), byref(handle)), "listening")
        self._handle = handle.value
        attributes = libucp.ListenerAttributes(field_mask=libucp.LISTENER_ATTR_FIELD_SOCKADDR)
        check(lib.ucp_listener_query(self._handle, byref(attributes)), "asking for the port")
        self.port = int.from_bytes(bytes(attributes.sockaddr)[2:4], "big")

    def _note_request(self, request: int, _arg: int | None) -> None:
        """UCX calls this while it progresses; an endpoint can only be made afterwards."""
        self._requests.append(request)

    def take_requests(self) -> list[int]:
        """Return the connection requests since the last call, for `Worker.accept`."""
        requests, self._requests = self._requests, []
        return requests

    def close(self) -> None:
        """Stop listening. Call this once, when all requests are accepted."""
        # With a request that is not accepted, or was rejected, UCX can crash here.
        lib.ucp_listener_destroy(self._handle)


def sockaddr(host: str, port: int) -> bytes:
    """Return a `struct sockaddr_in`. Raises `OSError` unless `host` is an IPv4 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a look-up would hold up every connection
        raise OSError(f"{host!r} is not an IP address") from None
    # libucp 1.21 corrupts the memory of the side that accepts a connection over IPv6.
    if address.version != 4:
        raise OSError(f"{host} is an IPv6 address: UCX moves KV over IPv4 only")
    if not 0 <= port <= MAX_PORT:
        raise OSError(f"{port} is not a port")
    family = socket.AF_INET.to_bytes(2, sys.byteorder)
    return family + port.to_bytes(2, "big") + address.packed + bytes(8)
