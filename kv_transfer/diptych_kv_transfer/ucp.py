"""One-sided writes through libucp, on the endpoints and contexts that UCXX made.

UCXX has no Python binding for them. One `ucp_put_nbx` a run costs a microsecond where a tag message
of UCXX costs ten on either side, and takes one message from the receiver, not three a run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

UCS_OK, UCS_INPROGRESS = 0, 1
LAST_ERROR = -100
"""`UCS_ERR_LAST`: a request pointer from here up to zero is a status."""
EP_ATTR_FIELD_TRANSPORTS = 1 << 3
MEM_MAP_FIELD_ADDRESS_AND_LENGTH = 3
MAX_TRANSPORTS = 16


class _MemMapParams(ctypes.Structure):
    """`ucp_mem_map_params_t` up to the fields we set, and room for what follows."""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("rest", c_char * 96),
    ]


class _RequestParam(ctypes.Structure):
    """`ucp_request_param_t` with nothing asked for."""

    _fields_ = [
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("rest", c_char * 128),
    ]


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


def _bind(library: Any) -> Any:
    for name, result, arguments in (
        ("ucp_mem_map", c_int, [c_void_p] * 3),
        ("ucp_mem_unmap", c_int, [c_void_p] * 2),
        ("ucp_rkey_pack", c_int, [c_void_p] * 4),
        ("ucp_rkey_buffer_release", None, [c_void_p]),
        ("ucp_ep_rkey_unpack", c_int, [c_void_p] * 3),
        ("ucp_rkey_destroy", None, [c_void_p]),
        ("ucp_put_nbx", c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p]),
        ("ucp_ep_flush_nbx", c_void_p, [c_void_p] * 2),
        ("ucp_request_check_status", c_int, [c_void_p]),
        ("ucp_request_free", None, [c_void_p]),
        ("ucp_ep_query", c_int, [c_void_p] * 2),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


# Every call takes microseconds. Giving up the interpreter's lock for each of a few hundred would
# let the engine's thread in as often, for up to five milliseconds.
_ucp = _bind(ctypes.PyDLL("libucp.so.0"))
_NOTHING = _RequestParam()


class UcpError(Exception):
    """UCX refused."""


def _check(status: int, what: str) -> None:
    if status != UCS_OK:
        raise UcpError(f"{what}: UCX status {status}")


class Registry:
    """Which of our memory UCX knows, with the keys that let a peer write to it."""

    def __init__(self, context: int) -> None:
        """`context` is the handle of a UCP context that outlives this."""
        self._context = context
        self._known: dict[int, tuple[weakref.ref[Any], int, bytes]] = {}
        self._gone: list[int] = []

    def key_of(self, buffer: NDArray[np.uint8]) -> bytes:
        """The packed remote key of the array that a buffer is a part of.

        It is registered the first time, and stays so until it is collected.
        """
        self._unmap_gone()
        root = buffer
        while isinstance(root.base, np.ndarray):
            root = root.base
        known = self._known.get(id(root))
        if known is None:
            known = self._known[id(root)] = self._register(root)
        return known[2]

    def _register(self, root: NDArray[np.uint8]) -> tuple[weakref.ref[Any], int, bytes]:
        handle, packed, length = c_void_p(), c_void_p(), c_size_t()
        params = _MemMapParams(
            MEM_MAP_FIELD_ADDRESS_AND_LENGTH, root.__array_interface__["data"][0], root.nbytes
        )
        _check(_ucp.ucp_mem_map(self._context, byref(params), byref(handle)), "registering memory")
        _check(
            _ucp.ucp_rkey_pack(self._context, handle, byref(packed), byref(length)),
            "packing a memory key",
        )
        key = ctypes.string_at(packed, length.value)
        _ucp.ucp_rkey_buffer_release(packed)
        identity, mapped = id(root), int(handle.value or 0)

        def forget(_: object) -> None:
            # Any thread may drop the last reference; UCX is left to the one that owns it.
            del self._known[identity]
            self._gone.append(mapped)

        return weakref.ref(root, forget), mapped, key

    def _unmap_gone(self) -> None:
        while self._gone:
            _ucp.ucp_mem_unmap(self._context, self._gone.pop())

    def close(self) -> None:
        """Unmap everything."""
        self._gone += [mapped for _, mapped, _ in self._known.values()]
        self._known.clear()
        self._unmap_gone()


class Put:
    """Writes from our memory to a peer's, and the flush after them."""

    def __init__(
        self,
        endpoint: int,
        sources: Sequence[tuple[int, int]],
        targets: Sequence[tuple[int, int]],
        keys: Sequence[bytes],
    ) -> None:
        """Write each source (address, length) to its target (address, index of its key).

        The sources must stay as they are until it has `ended`.
        """
        self._keys: list[c_void_p] = []
        self._requests: list[int] = []
        self._flush: int | None = None
        self._refused = False
        for key in keys:
            unpacked = c_void_p()
            self._refused |= _ucp.ucp_ep_rkey_unpack(endpoint, key, byref(unpacked)) != UCS_OK
            self._keys.append(unpacked)
        param, put = byref(_NOTHING), _ucp.ucp_put_nbx
        for (address, length), (target, key_index) in zip(sources, targets, strict=True):
            if length and not self._refused:
                key_handle = self._keys[key_index]
                self._keep(put(endpoint, address, length, target, key_handle, param))
        if not self._refused:
            self._flush = self._keep(_ucp.ucp_ep_flush_nbx(endpoint, param))

    def _keep(self, request: int | None) -> int | None:
        """Remember a request. None: it has ended at once; an error comes instead of a pointer."""
        if request is None:
            return None
        if LAST_ERROR <= ctypes.c_int64(request).value < 0:
            self._refused = True
            return None
        self._requests.append(request)
        return request

    @property
    def done(self) -> bool:
        """Everything has arrived, or will not."""
        return self._flush is None or _status(self._flush) != UCS_INPROGRESS

    @property
    def ok(self) -> bool:
        """Everything has arrived."""
        arrived = self._flush is None or _status(self._flush) == UCS_OK
        return arrived and not self._refused

    @property
    def ended(self) -> bool:
        """UCX touches the sources no more."""
        return all(_status(request) != UCS_INPROGRESS for request in self._requests)

    def free(self) -> None:
        """Give UCX back what it lent; to be called when it has ended."""
        for request in self._requests:
            _ucp.ucp_request_free(request)
        for key in self._keys:
            if key:
                _ucp.ucp_rkey_destroy(key)
        self._requests, self._keys, self._flush = [], [], None


def _status(request: int) -> int:
    status: int = _ucp.ucp_request_check_status(request)
    return status


def transports_of(endpoint: int) -> str:
    """Which UCX transports an endpoint uses."""
    entries = (_TransportEntry * MAX_TRANSPORTS)()
    attributes = _EndpointAttributes(
        field_mask=EP_ATTR_FIELD_TRANSPORTS,
        entries=entries,
        num_entries=MAX_TRANSPORTS,
        entry_size=ctypes.sizeof(_TransportEntry),
    )
    if _ucp.ucp_ep_query(endpoint, byref(attributes)) != UCS_OK:
        return ""
    found = entries[: attributes.num_entries]
    return ",".join(sorted({entry.transport.decode() for entry in found if entry.transport}))
