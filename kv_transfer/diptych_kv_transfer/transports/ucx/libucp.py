"""libucp's C interface, in ctypes: the structures, constants and functions that the hinge uses.

The structures are complete and in the order of `ucp.h`, which comes with the library. A test
compiles that header and compares every size, offset and constant. Other modules use UCX only
through the classes and functions of `worker.py`, `requests.py` and `same_host.py`.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, Final

import libucx

API_VERSION: Final = (1, 21)
"""Major and minor version of the header that this module repeats."""

# --- ucs_status_t -----------------------------------------------------------------------------

OK: Final = 0
IN_PROGRESS: Final = 1
ERR_BUSY: Final = -15
ERR_LAST: Final = -100
"""Values from here up to zero are a status, not a request pointer."""

# --- field masks, flags and modes -------------------------------------------------------------

PARAM_FIELD_FEATURES: Final = 1 << 0
FEATURE_TAG: Final = 1 << 0
FEATURE_RMA: Final = 1 << 1
FEATURE_WAKEUP: Final = 1 << 4
FEATURE_STREAM: Final = 1 << 5
WORKER_PARAM_FIELD_THREAD_MODE: Final = 1 << 0
THREAD_MODE_SERIALIZED: Final = 1
LISTENER_PARAM_FIELD_SOCK_ADDR: Final = 1 << 0
LISTENER_PARAM_FIELD_CONN_HANDLER: Final = 1 << 2
LISTENER_ATTR_FIELD_SOCKADDR: Final = 1 << 0
EP_PARAM_FIELD_REMOTE_ADDRESS: Final = 1 << 0
EP_PARAM_FIELD_ERR_HANDLING_MODE: Final = 1 << 1
EP_PARAM_FIELD_ERR_HANDLER: Final = 1 << 2
EP_PARAM_FIELD_SOCK_ADDR: Final = 1 << 4
EP_PARAM_FIELD_FLAGS: Final = 1 << 5
EP_PARAM_FIELD_CONN_REQUEST: Final = 1 << 6
EP_PARAMS_FLAGS_CLIENT_SERVER: Final = 1 << 0
EP_PARAMS_FLAGS_NO_LOOPBACK: Final = 1 << 1
ERR_HANDLING_MODE_PEER: Final = 1
EP_ATTR_FIELD_REMOTE_SOCKADDR: Final = 1 << 2
EP_ATTR_FIELD_TRANSPORTS: Final = 1 << 3
EP_CLOSE_FLAG_FORCE: Final = 1 << 0
MEM_MAP_PARAM_FIELD_ADDRESS: Final = 1 << 0
MEM_MAP_PARAM_FIELD_LENGTH: Final = 1 << 1
OP_ATTR_FIELD_FLAGS: Final = 1 << 4
OP_ATTR_FLAG_NO_IMM_CMPL: Final = 1 << 16
STREAM_RECV_FLAG_WAITALL: Final = 1 << 0

# --- structures -------------------------------------------------------------------------------

ConnectionCallback = CFUNCTYPE(None, c_void_p, c_void_p)
"""Takes a connection request and the listener's `arg`."""
ErrorCallback = CFUNCTYPE(None, c_void_p, c_void_p, c_int8)
"""Takes the endpoint's `arg`, the endpoint and a status."""
SOCKADDR_STORAGE_BYTES: Final = 128


class SockAddr(ctypes.Structure):
    """`ucs_sock_addr_t`"""

    _fields_ = [("addr", c_char_p), ("addrlen", c_uint32)]


class Params(ctypes.Structure):
    """`ucp_params_t`"""

    _fields_ = [
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    ]


class WorkerParams(ctypes.Structure):
    """`ucp_worker_params_t`"""

    _fields_ = [
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    ]


class ConnectionHandler(ctypes.Structure):
    """`ucp_listener_conn_handler_t`"""

    _fields_ = [("cb", ConnectionCallback), ("arg", c_void_p)]


class AcceptHandler(ctypes.Structure):
    """`ucp_listener_accept_handler_t`"""

    _fields_ = [("cb", c_void_p), ("arg", c_void_p)]


class ListenerParams(ctypes.Structure):
    """`ucp_listener_params_t`"""

    _fields_ = [
        ("field_mask", c_uint64),
        ("sockaddr", SockAddr),
        ("accept_handler", AcceptHandler),
        ("conn_handler", ConnectionHandler),
    ]


class SockaddrStorage(ctypes.Structure):
    """`struct sockaddr_storage`, which begins with the address family"""

    _fields_ = [("words", c_uint64 * (SOCKADDR_STORAGE_BYTES // 8))]


class ListenerAttributes(ctypes.Structure):
    """`ucp_listener_attr_t`"""

    _fields_ = [("field_mask", c_uint64), ("sockaddr", SockaddrStorage)]


class ErrorHandler(ctypes.Structure):
    """`ucp_err_handler_t`"""

    _fields_ = [("cb", ErrorCallback), ("arg", c_void_p)]


class EndpointParams(ctypes.Structure):
    """`ucp_ep_params_t`"""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_char_p),
        ("err_mode", c_int),
        ("err_handler", ErrorHandler),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", SockAddr),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", SockAddr),
    ]


class TransportEntry(ctypes.Structure):
    """`ucp_transport_entry_t`"""

    _fields_ = [("transport_name", c_char_p), ("device_name", c_char_p)]


class Transports(ctypes.Structure):
    """`ucp_transports_t`"""

    _fields_ = [
        ("entries", POINTER(TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
    ]


class EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t`"""

    _fields_ = [
        ("field_mask", c_uint64),
        ("name", c_char * 32),
        ("local_sockaddr", SockaddrStorage),
        ("remote_sockaddr", SockaddrStorage),
        ("transports", Transports),
        ("user_data", c_void_p),
    ]


class MemMapParams(ctypes.Structure):
    """`ucp_mem_map_params_t`"""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    ]


class TagInfo(ctypes.Structure):
    """`ucp_tag_recv_info_t`"""

    _fields_ = [("sender_tag", c_uint64), ("length", c_size_t)]


class RequestParam(ctypes.Structure):
    """`ucp_request_param_t`"""

    _fields_ = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]


# --- functions --------------------------------------------------------------------------------

_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "ucp_config_read": (c_int8, [c_char_p, c_char_p, POINTER(c_void_p)]),
    "ucp_config_modify": (c_int8, [c_void_p, c_char_p, c_char_p]),
    "ucp_config_release": (None, [c_void_p]),
    "ucp_init_version": (c_int8, [c_uint, c_uint, POINTER(Params), c_void_p, POINTER(c_void_p)]),
    "ucp_cleanup": (None, [c_void_p]),
    "ucp_worker_create": (c_int8, [c_void_p, POINTER(WorkerParams), POINTER(c_void_p)]),
    "ucp_worker_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (c_int8, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_get_efd": (c_int8, [c_void_p, POINTER(c_int)]),
    "ucp_worker_arm": (c_int8, [c_void_p]),
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_listener_create": (c_int8, [c_void_p, POINTER(ListenerParams), POINTER(c_void_p)]),
    "ucp_listener_query": (c_int8, [c_void_p, POINTER(ListenerAttributes)]),
    "ucp_listener_destroy": (None, [c_void_p]),
    "ucp_ep_create": (c_int8, [c_void_p, POINTER(EndpointParams), POINTER(c_void_p)]),
    "ucp_ep_query": (c_int8, [c_void_p, POINTER(EndpointAttributes)]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, POINTER(RequestParam)]),
    "ucp_mem_map": (c_int8, [c_void_p, POINTER(MemMapParams), POINTER(c_void_p)]),
    "ucp_mem_unmap": (c_int8, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (c_int8, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (c_int8, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_get_nbx": (
        c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(RequestParam)],
    ),
    "ucp_tag_send_nbx": (
        c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, POINTER(RequestParam)],
    ),
    "ucp_tag_recv_nbx": (
        c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, POINTER(RequestParam)],
    ),
    "ucp_tag_recv_request_test": (c_int8, [c_void_p, POINTER(TagInfo)]),
    "ucp_tag_probe_nb": (c_void_p, [c_void_p, c_uint64, c_uint64, c_int, POINTER(TagInfo)]),
    "ucp_tag_msg_recv_nbx": (
        c_void_p, [c_void_p, c_void_p, c_size_t, c_void_p, POINTER(RequestParam)],
    ),
    "ucp_stream_send_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, POINTER(RequestParam)]),
    "ucp_stream_recv_nbx": (
        c_void_p, [c_void_p, c_void_p, c_size_t, POINTER(c_size_t), POINTER(RequestParam)],
    ),
    "ucp_request_check_status": (c_int8, [c_void_p]),
    "ucp_request_cancel": (None, [c_void_p, c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
}  # fmt: skip


def _load() -> tuple[Any, Any]:
    """The library, with functions that keep the interpreter's lock, and that release it."""
    # These variables are read when the library is loaded.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # stdout is for what programs were asked
    # UCX puts itself before eight functions of libc, and spins this long at each of them, so that
    # other threads leave its first few instructions. Its 50 ms add 0.4 s to every engine's start.
    os.environ.setdefault("UCX_MEM_BISTRO_GRACE_DURATION", "1ms")
    libucx.load_library()
    libraries = ctypes.PyDLL("libucp.so.0"), ctypes.CDLL("libucp.so.0")
    for library in libraries:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return libraries


lib, lib_without_lock = _load()
"""`lib` keeps the interpreter's lock, for calls of some microseconds. Releasing it for each of them
would let the engine's thread in as often, for up to five milliseconds. `lib_without_lock` is for
calls that may copy megabytes."""


class UcpError(Exception):
    """UCX refused."""


def check(status: int, what: str) -> None:
    """Raise `UcpError` unless a status is OK."""
    if status != OK:
        raise UcpError(f"{what}: UCX status {status}")


def status_in(pointer: int | None) -> int | None:
    """Return the status that a function returned in place of a request; None if it is a request."""
    if pointer is None:
        return OK
    status = ctypes.c_int64(pointer).value
    return status if ERR_LAST <= status < 0 else None
