"""Cuts off who has connected to UCX's port without asking for a connection.

UCX waits for the whole of a request for ever. Where more comes than a request may have, it reads no
more, misses the end, and one of its threads looks at the socket without a pause until the engine
ends. It tells nobody of such sockets. So they are looked for among those of the process. Who has
sent what UCX leaves unread from one look to the next is cut off then, not when its time is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
from collections.abc import Iterator, Set
from typing import Final

from diptych_kv_transfer.tables.actions import Address

LOOK_S: Final = 2.0
"""The time between two looks, in seconds. One takes 1 ms."""
NO_ADDRESS: Final = bytes(16)
"""A `struct sockaddr` of the family AF_UNSPEC: to connect a TCP socket to it resets it."""

_connect = ctypes.CDLL(None).connect  # Python's takes addresses of the socket's own family only
_connect.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]


class Loiterers:
    """The connections at one port that UCX has made nothing of, and since when they are there."""

    def __init__(self, port: int, patience_s: float, most: int) -> None:
        """patience_s: how long they may stay. most: how many; beyond it the oldest are cut off."""
        self._port, self._patience_s, self._most = port, patience_s, most
        self._since: dict[int, float] = {}
        """By the inode of the socket, the oldest first."""
        self._unread = set[int]()
        """Those of which UCX had left something unread at the last look."""

    def cut_off(self, known: Set[Address], now: float) -> None:
        """Cut off those that have been there for too long, are too many, or are still unread.

        known: the callers of all connections that UCX has made.
        """
        late = {*list(self._since)[: -self._most]}
        late |= {one for one, since in self._since.items() if now - since >= self._patience_s}
        seen, unread = dict[int, float](), set[int]()
        with contextlib.suppress(OSError):  # no descriptor is left: the next look tries again
            for accepted in _accepted_at(self._port):
                inode = os.fstat(accepted.fileno()).st_ino
                if (caller := _caller(accepted)) in known:
                    continue
                # To look would take the error of one that has gone from UCX, which needs it.
                if caller is not None and _is_unread(accepted):
                    unread.add(inode)
                if inode in late or inode in unread & self._unread:
                    _reset(accepted)
                else:
                    seen[inode] = self._since.get(inode, now)
        self._since = dict(sorted(seen.items(), key=lambda one: one[1]))
        self._unread = unread


def _accepted_at(port: int) -> Iterator[socket.socket]:
    """Yield the sockets of this process that others have connected to at this port, one at a time:
    each is a copy, and is closed when the next is asked for."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed meanwhile, or has no address
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with _copy_of(number) as one:
                is_tcp = (one.family, one.type) == (socket.AF_INET, socket.SOCK_STREAM)
                if not is_tcp or one.getsockname()[1] != port:
                    continue
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield one


def _copy_of(number: int) -> socket.socket:
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # it is something else by now
        os.close(copy)
        raise


def _caller(accepted: socket.socket) -> Address | None:
    try:
        host, port = accepted.getpeername()
    except OSError:  # it has reset the connection
        return None
    return host, port


def _is_unread(accepted: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # nothing is there, or it has reset the connection
        return bool(accepted.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def _reset(accepted: socket.socket) -> None:
    """Make UCX find the socket broken, so that it closes it: without anything to read, and with an
    error for whoever reads."""
    _connect(accepted.fileno(), NO_ADDRESS, len(NO_ADDRESS))
    with contextlib.suppress(OSError):  # it is said to have no peer, and wakes UCX nevertheless
        accepted.shutdown(socket.SHUT_RD)
