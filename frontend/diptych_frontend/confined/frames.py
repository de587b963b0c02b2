"""Messages between an owner and its process: a head in msgpack and a body of raw bytes."""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

LENGTHS: Final = struct.Struct("<II")


class ConnectionEndedError(Exception):
    """The other end is gone."""


def send_frame(
    connection: socket.socket, head: bytes, body: bytes | memoryview, due: float
) -> None:
    """Send a message. Raises `ConnectionEndedError`, and `TimeoutError` after `due` (monotonic)."""
    try:
        for part in (LENGTHS.pack(len(head), len(body)) + head, body):
            connection.settimeout(_left(due))
            connection.sendall(part)
    except TimeoutError:
        raise
    except OSError as exc:
        raise ConnectionEndedError from exc


def receive_frame(
    connection: socket.socket, max_bytes: int, due: float
) -> tuple[bytearray, bytearray]:
    """Receive head and body. Raises as `send_frame`, and `ConnectionEndedError` for a message of
    more than `max_bytes`."""
    lengths = LENGTHS.unpack(_received(connection, LENGTHS.size, due))
    if sum(lengths) > max_bytes:
        raise ConnectionEndedError(f"a message of {sum(lengths)} bytes")
    head = _received(connection, lengths[0], due)
    return head, _received(connection, lengths[1], due)


def has_come(connection: socket.socket, seconds: float) -> bool:
    """Whether a part of a message, or the end of the connection, arrives within that time."""
    connection.settimeout(seconds)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, TimeoutError):
        return False
    except OSError:
        return True  # whoever reads it sees the same
    return True


def _received(connection: socket.socket, length: int, due: float) -> bytearray:
    received = bytearray(length)
    view = memoryview(received)
    while view:
        connection.settimeout(_left(due))
        try:
            count = connection.recv_into(view)
        except TimeoutError:
            raise
        except OSError as exc:
            raise ConnectionEndedError from exc
        if not count:
            raise ConnectionEndedError
        view = view[count:]
    return received


def _left(due: float) -> float:
    left = due - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
