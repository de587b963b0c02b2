"""Messages of several frames, sent and received without waiting.

Arrays stay in the memory that ZMQ received them into.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from diptych_protocol.arrays import Frame

# As plain integers: arithmetic with members of an enum takes longer than the calls.
NOBLOCK = int(zmq.NOBLOCK)
MORE = NOBLOCK | int(zmq.SNDMORE)


def receive_frames(socket: zmq.Socket[bytes], head: int) -> tuple[list[bytes], list[Frame]]:
    """The next message: its first `head` frames as bytes, which is quicker for small ones, and the
    others as views of ZMQ's own memory.

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
    """Send a message. Raises `zmq.Again` if nobody is there to take it."""
    for frame in frames[:-1]:
        socket.send(frame, MORE)
    socket.send(frames[-1], NOBLOCK)
