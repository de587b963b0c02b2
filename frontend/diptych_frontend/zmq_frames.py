"""Receiving messages whose arrays stay in the memory that ZMQ received them into."""

from __future__ import annotations

import zmq

from diptych_protocol.arrays import Frame


def receive_frames(socket: zmq.Socket[bytes], head: int) -> tuple[list[bytes], list[Frame]]:
    """The next message, without waiting: its first `head` frames as bytes, which is quicker for
    small ones, and the others as views of ZMQ's own memory.

    Raises `zmq.Again` if there is none.
    """
    heads = [socket.recv(zmq.NOBLOCK)]
    arrays: list[Frame] = []
    while socket.getsockopt(zmq.RCVMORE):
        if len(heads) < head:
            heads.append(socket.recv(zmq.NOBLOCK))
        else:
            arrays.append(socket.recv(zmq.NOBLOCK, copy=False).buffer)
    return heads, arrays
