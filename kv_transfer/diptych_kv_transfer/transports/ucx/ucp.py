"""UCX: UCXX's binding, and what is needed of libucp and has none there.

A tag message of UCXX costs ten microseconds on either side, one of these a single one.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from typing import Any

import libucx
import numpy as np
from numpy.typing import NDArray

# Read when the library is loaded.
os.environ.setdefault("UCX_LOG_LEVEL", "error")
# UCX puts itself before eight functions of libc, and spins this long at each of them, so that other
# threads leave its first few instructions. Its 50 ms add 0.4 s to the start of every engine.
os.environ.setdefault("UCX_MEM_BISTRO_GRACE_DURATION", "1ms")
libucx.load_library()

from ucxx._lib import libucxx as libucxx  # noqa: E402  (it needs both)
from ucxx._lib.arr import Array as Array  # noqa: E402

OK, IN_PROGRESS = 0, 1
LAST_ERROR = -100
"""`UCS_ERR_LAST`: a request pointer from here up to zero is a status."""
ALL_BITS = (1 << 64) - 1
EP_ATTR_FIELD_REMOTE_SOCKADDR, EP_ATTR_FIELD_TRANSPORTS = 1 << 2, 1 << 3
MEM_MAP_FIELD_ADDRESS_AND_LENGTH = 3
OP_ATTR_FIELD_FLAGS = 1 << 4
OP_ATTR_FLAG_NO_IMM_CMPL = 1 << 16
STREAM_RECV_FLAG_WAITALL = 1
MAX_TRANSPORTS = 16


class UcpError(Exception):
    """UCX refused."""


class _MemMapParams(ctypes.Structure):
    """`ucp_mem_map_params_t` up to the fields we set, and room for what follows."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("rest", c_char * 96),
    ]


class _RequestParam(ctypes.Structure):
    """`ucp_request_param_t` up to the fields we set, and room for what follows."""

    _fields_ = [
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("rest", c_char * 128),
    ]


class _TagInfo(ctypes.Structure):
    """`ucp_tag_recv_info_t`"""

    _fields_ = [("sender_tag", c_uint64), ("length", c_size_t)]


class _TransportEntry(ctypes.Structure):
    """`ucp_transport_entry_t`"""

    _fields_ = [("transport", c_char_p), ("device", c_char_p)]


class _EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t` up to the field that is asked for, and room for what follows."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("name", c_char * 32),
        ("local_sockaddr", c_char * 128),
        ("remote_sockaddr", c_char * 128),
        ("entries", POINTER(_TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
        ("rest", c_char * 64),
    ]


_REMOTE_AT = _EndpointAttributes.remote_sockaddr.offset


def _bind(library: Any) -> Any:
    for name, result, arguments in (
        ("ucp_mem_map", c_int, [c_void_p] * 3),
        ("ucp_mem_unmap", c_int, [c_void_p] * 2),
        ("ucp_rkey_pack", c_int, [c_void_p] * 4),
        ("ucp_rkey_buffer_release", None, [c_void_p]),
        ("ucp_ep_rkey_unpack", c_int, [c_void_p] * 3),
        ("ucp_rkey_destroy", None, [c_void_p]),
        ("ucp_get_nbx", c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p]),
        ("ucp_tag_send_nbx", c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p]),
        ("ucp_tag_recv_nbx", c_void_p, [c_void_p, c_void_p, c_size_t, *[c_uint64] * 2, c_void_p]),
        ("ucp_tag_recv_request_test", c_int, [c_void_p] * 2),
        ("ucp_tag_probe_nb", c_void_p, [c_void_p, c_uint64, c_uint64, c_int, c_void_p]),
        ("ucp_tag_msg_recv_nbx", c_void_p, [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p]),
        ("ucp_stream_recv_nbx", c_void_p, [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p]),
        ("ucp_request_check_status", c_int8, [c_void_p]),
        ("ucp_request_cancel", None, [c_void_p] * 2),
        ("ucp_request_free", None, [c_void_p]),
        ("ucp_ep_query", c_int, [c_void_p] * 2),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


# Every call takes microseconds. Giving up the interpreter's lock for each of a few hundred would
# let the engine's thread in as often, for up to five milliseconds.
_ucp = _bind(ctypes.PyDLL("libucp.so.0"))
_param = _RequestParam(op_attr_mask=OP_ATTR_FLAG_NO_IMM_CMPL)
_PARAM = byref(_param)
_whole = _RequestParam(op_attr_mask=OP_ATTR_FIELD_FLAGS, flags=STREAM_RECV_FLAG_WAITALL)


def address_of(buffer: NDArray[np.uint8]) -> int:
    """Where the bytes of a writable array are."""
    # numpy's own ways to tell take five times as long, and a hand-off asks hundreds of times.
    return ctypes.addressof(_Bytes.from_buffer(buffer.data))


_Bytes = c_char * 0
_nothing = c_char()
"""Where messages go that nobody wants: none of their bytes are written."""


def tag_send(endpoint: int, address: int, length: int, tag: int) -> int:
    """Begin to send bytes of ours as one message; returns the request."""
    return _request(_ucp.ucp_tag_send_nbx(endpoint, address, length, tag, _PARAM))


def tag_receive(worker: int, address: int, length: int, tag: int) -> int:
    """Begin to receive the message with this tag into our memory; returns the request."""
    return _request(_ucp.ucp_tag_recv_nbx(worker, address, length, tag, ALL_BITS, _PARAM))


def get(endpoint: int, address: int, length: int, remote_address: int, key: int) -> int:
    """Begin to read memory of a peer into ours; returns the request."""
    return _request(_ucp.ucp_get_nbx(endpoint, address, length, remote_address, key, _PARAM))


def _request(request: int | None) -> int:
    """Check what UCX returned. Because of NO_IMM_CMPL there is always a request; instead of its
    address there may be an error, for which this raises `UcpError`."""
    if request is None or LAST_ERROR <= ctypes.c_int64(request).value < 0:
        raise UcpError(f"UCX status {request and ctypes.c_int64(request).value}")
    return request


def drop_unexpected(worker: int) -> int:
    """Drop tag messages that have arrived although no receive waits for them; returns how many.

    UCX keeps all of them, even beyond the end of their connection, for a receive that may still be
    posted. Here receives are posted before a sender learns of their tag, so a message that no
    receive waits for is late, or malicious.
    """
    info, dropped = _TagInfo(), 0
    while (message := _ucp.ucp_tag_probe_nb(worker, 0, 0, 1, byref(info))) is not None:
        request = _ucp.ucp_tag_msg_recv_nbx(worker, byref(_nothing), 0, message, _PARAM)
        if request is not None and not LAST_ERROR <= ctypes.c_int64(request).value < 0:
            free(request)  # UCX ends it without us
        dropped += 1
    return dropped


def status_of(request: int) -> int:
    """OK, IN_PROGRESS or an error's negative number."""
    status: int = _ucp.ucp_request_check_status(request)
    return status


def received_bytes(request: int) -> int:
    """The length, in bytes, of the message that a request has received."""
    info = _TagInfo()
    _ucp.ucp_tag_recv_request_test(request, byref(info))
    return int(info.length)


def cancel(worker: int, request: int) -> None:
    """Cancel a request: it ends soon, whether its message comes or not."""
    _ucp.ucp_request_cancel(worker, request)


def free(request: int) -> None:
    """Give a request back to UCX."""
    _ucp.ucp_request_free(request)


class StreamReceive:
    """The next bytes of an endpoint's stream, on their way to us.

    UCXX's own request is never freed if its endpoint is closed before it has ended, and holds the
    endpoint, the worker and all their descriptors.
    """

    def __init__(self, endpoint: int, num_bytes: int) -> None:
        self._bytes, self._length = np.empty(num_bytes, np.uint8), c_size_t()
        self._status = OK
        request: int | None = _ucp.ucp_stream_recv_nbx(
            endpoint, address_of(self._bytes), num_bytes, byref(self._length), byref(_whole)
        )
        if request is not None and LAST_ERROR <= ctypes.c_int64(request).value < 0:
            self._status, request = ctypes.c_int64(request).value, None
        self._request = request

    @property
    def ended(self) -> bool:
        """UCX writes to the buffer no more."""
        if self._request is not None:
            self._status = status_of(self._request)
            if self._status != IN_PROGRESS:
                free(self._request)
                self._request = None
        return self._request is None

    def result(self) -> bytes | None:
        """The bytes that were received, once this has ended; None: the stream is over."""
        return self._bytes.tobytes() if self._status == OK else None


class ReadableMemory:
    """An array that peers may read, by its `key`, for as long as this is open."""

    def __init__(self, context: int, array: NDArray[np.uint8]) -> None:
        """Raises `UcpError`."""
        self._context, self._array, self._handle = context, array, c_void_p()
        params = _MemMapParams(MEM_MAP_FIELD_ADDRESS_AND_LENGTH, address_of(array), array.nbytes)
        _check(_ucp.ucp_mem_map(context, byref(params), byref(self._handle)), "registering memory")
        packed, length = c_void_p(), c_size_t()
        _check(
            _ucp.ucp_rkey_pack(context, self._handle, byref(packed), byref(length)),
            "packing a memory key",
        )
        self.key = ctypes.string_at(packed, length.value)
        """Packed, for `unpack_key` of a peer."""
        _ucp.ucp_rkey_buffer_release(packed)

    def close(self) -> None:
        _ucp.ucp_mem_unmap(self._context, self._handle)


def unpack_key(endpoint: int, packed: bytes) -> int:
    """A peer's key for use on its endpoint, until `destroy_key`. Raises `UcpError`."""
    key = c_void_p()
    _check(_ucp.ucp_ep_rkey_unpack(endpoint, packed, byref(key)), "unpacking a memory key")
    return int(key.value or 0)


def destroy_key(key: int) -> None:
    _ucp.ucp_rkey_destroy(key)


def _check(status: int, what: str) -> None:
    if status != OK:
        raise UcpError(f"{what}: UCX status {status}")


def remote_host_of(endpoint: int) -> str:
    """The IP address of an endpoint's other side; empty if UCX does not know it."""
    attributes = _EndpointAttributes(field_mask=EP_ATTR_FIELD_REMOTE_SOCKADDR)
    if _ucp.ucp_ep_query(endpoint, byref(attributes)) != OK:
        return ""
    raw = bytes(memoryview(attributes).cast("B"))[_REMOTE_AT : _REMOTE_AT + 128]
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[4:8])
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, raw[8:24])
    return ""


def transports_of(endpoint: int) -> str:
    """Which UCX transports an endpoint uses."""
    entries = (_TransportEntry * MAX_TRANSPORTS)()
    attributes = _EndpointAttributes(
        field_mask=EP_ATTR_FIELD_TRANSPORTS,
        entries=entries,
        num_entries=MAX_TRANSPORTS,
        entry_size=ctypes.sizeof(_TransportEntry),
    )
    if _ucp.ucp_ep_query(endpoint, byref(attributes)) != OK:
        return ""
    found = entries[: attributes.num_entries]
    return ",".join(sorted({entry.transport.decode() for entry in found if entry.transport}))
