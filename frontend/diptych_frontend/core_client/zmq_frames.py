"""Sends and receives messages of several frames without blocking.

Arrays stay in the memory into which ZMQ received them.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from diptych_protocol.arrays import Frame

# As plain integers: arithmetic with members of an enum takes longer than the calls.
NOBLOCK = int(zmq.NOBLOCK)
MORE = NOBLOCK | int(zmq.SNDMORE)


def receive_frames(socket: zmq.Socket[bytes], head: int) -> tuple[list[bytes], list[Frame]]:
    """Return the next message: its first `head` frames as bytes, which is quicker for small ones,
    and the others as views of ZMQ's own memory.

    Raises `zmq.Again` if there is none.
    """
    heads = [socket.recv(NOBLOCK)]
    arrays: list[Frame] = []
    while socket.getsockopt(zmq.RCVMORE):
        if len(heads) < head:
            heads.append(socket.recv(NOBLOCK))
        else:
            arrays.append(socket.recv(NOBLOCK, copy=False).buffer)
    return heads, arrays


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send a message. Raises `zmq.Again` if no peer can take it."""
    for frame in frames[:-1]:
        socket.send(frame, MORE)
    socket.send(frames[-1], NOBLOCK)
