"""UCX's requests: sends, receives and reads that do not block, by tag, stream or remote address.

A request is the address of UCX's own record, as an int. The caller that began it frees it once
`status_of` says that it is no longer in progress.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_size_t
from typing import Final

from diptych_kv_transfer.transports.ucx import libucp
from diptych_kv_transfer.transports.ucx.libucp import IN_PROGRESS, OK, UcpError, lib, status_in

ALL_BITS: Final = (1 << 64) - 1
_PARAM = byref(libucp.RequestParam(op_attr_mask=libucp.OP_ATTR_FLAG_NO_IMM_CMPL))
"""UCX returns a request also for what it has done at once."""
_BYTES = byref(libucp.RequestParam())
"""Streams send without NO_IMM_CMPL: with it, libucp 1.21 would forget to send anything."""
_WHOLE = byref(
    libucp.RequestParam(
        op_attr_mask=libucp.OP_ATTR_FIELD_FLAGS, flags=libucp.STREAM_RECV_FLAG_WAITALL
    )
)
_nothing = c_char()
"""Where messages go that nobody wants: none of their bytes are written."""


def tag_send(endpoint: int, address: int, length: int, tag: int) -> int:
    """Begin to send our bytes as one message and return the request. Raises `UcpError`."""
    return _request(lib.ucp_tag_send_nbx(endpoint, address, length, tag, _PARAM))


def tag_receive(worker: int, address: int, length: int, tag: int) -> int:
    """Begin to receive the message with this tag into our memory and return the request.

    Raises `UcpError`.
    """
    return _request(lib.ucp_tag_recv_nbx(worker, address, length, tag, ALL_BITS, _PARAM))


def get(endpoint: int, address: int, length: int, remote_address: int, key: int) -> int:
    """Begin to read a peer's memory into ours and return the request. Raises `UcpError`."""
    return _request(lib.ucp_get_nbx(endpoint, address, length, remote_address, key, _PARAM))


def _request(pointer: int | None) -> int:
    """Check what UCX returned: because of NO_IMM_CMPL it is a request or an error."""
    status = status_in(pointer)
    if pointer is None or status is not None:
        raise UcpError(f"UCX status {status}")
    return pointer


def drop_unexpected(worker: int) -> int:
    """Drop tag messages that have arrived although no receive waits for them; return their number.

    UCX keeps all of them, even beyond the end of their connection, for a receive that may still be
    posted. Here receives are posted before a sender learns of their tag, so a message without a
    receive is late or malicious.
    """
    info, dropped = libucp.TagInfo(), 0
    while (message := lib.ucp_tag_probe_nb(worker, 0, 0, 1, byref(info))) is not None:
        pointer = lib.ucp_tag_msg_recv_nbx(worker, byref(_nothing), 0, message, _PARAM)
        if status_in(pointer) is None:
            free(pointer)  # UCX ends it without us
        dropped += 1
    return dropped


def status_of(request: int) -> int:
    """Return OK, IN_PROGRESS or an error's negative number."""
    status: int = lib.ucp_request_check_status(request)
    return status


def received_bytes(request: int) -> int:
    """Return the length, in bytes, of the message that a request has received."""
    info = libucp.TagInfo()
    lib.ucp_tag_recv_request_test(request, byref(info))
    return int(info.length)


def cancel(worker: int, request: int) -> None:
    """Cancel a request. It ends soon, whether its message comes or not."""
    lib.ucp_request_cancel(worker, request)


def free(request: int) -> None:
    """Give a request back to UCX."""
    lib.ucp_request_free(request)


class StreamSend:
    """Bytes on their way into an endpoint's stream."""

    def __init__(self, endpoint: int, data: bytes) -> None:
        """Raises `UcpError`."""
        self._data = data
        pointer = lib.ucp_stream_send_nbx(endpoint, data, len(data), _BYTES)
        status = status_in(pointer)
        if status not in (None, OK):
            raise UcpError(f"sending into a stream: UCX status {status}")
        self._request = pointer

    @property
    def ended(self) -> bool:
        """Whether UCX no longer reads the bytes. Errors show at the endpoint."""
        if self._request is not None and status_of(self._request) != IN_PROGRESS:
            free(self._request)
            self._request = None
        return self._request is None


class StreamReceive:
    """Receives the next bytes of an endpoint's stream."""

    def __init__(self, endpoint: int, num_bytes: int) -> None:
        self._bytes, self._length = (c_char * num_bytes)(), c_size_t()
        pointer = lib.ucp_stream_recv_nbx(
            endpoint, self._bytes, num_bytes, byref(self._length), _WHOLE
        )
        status = status_in(pointer)
        self._request = pointer if status is None else None
        self._status = OK if status is None else status

    @property
    def ended(self) -> bool:
        """Whether UCX no longer writes to the buffer."""
        if self._request is not None:
            self._status = status_of(self._request)
            if self._status != IN_PROGRESS:
                free(self._request)
                self._request = None
        return self._request is None

    def result(self) -> bytes | None:
        """Return the received bytes, once this has ended; None if the stream is over."""
        return ctypes.string_at(self._bytes, len(self._bytes)) if self._status == OK else None
