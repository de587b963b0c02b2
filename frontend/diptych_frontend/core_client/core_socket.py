"""The socket at which an engine listens for its clients."""

from __future__ import annotations

from typing import Final

import zmq

from diptych_frontend.core_client.client import ask_for_signs_of_life
from diptych_frontend.core_client.curve import CurveGate
from diptych_protocol import CurveKeys, wire

MAX_QUEUED_MESSAGES: Final = 10_000
"""A client that lags further behind than this is taken for lost."""


def bind_core_socket(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: CurveKeys | None
) -> tuple[zmq.Socket[bytes], CurveGate | None]:
    """Listen at an endpoint. With keys, only their holders are admitted, by the gate that is
    returned, which is to be closed with the socket.

    Raises `zmq.ZMQError` when the address is taken.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished client is an error, not silence
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    ask_for_signs_of_life(socket, endpoint)
    gate = CurveGate(keys) if keys is not None else None
    try:
        if gate is not None:
            gate.guard(context, socket)
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close()
        if gate is not None:
            gate.close()
        raise
    return socket, gate
