"""The socket at which an engine listens for its clients, from binding it to its last moments."""

from __future__ import annotations

import time
from collections.abc import Sequence
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


class Farewell:
    """Watches clients leave, so that they read the core's last words before its sockets close. Make
    it before they are told, so that none is missed.

    A client's ZMQ (with `ZMQ_IMMEDIATE`) drops what it has received and its program has not read
    yet, as soon as it sees the connection end. So the core waits until its clients have left.
    """

    def __init__(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        self._sockets = sockets
        self._monitors = [socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) for socket in sockets]
        self.num_told = 0
        """Clients that have been sent the last words."""

    def wait(self, timeout_s: float) -> None:
        """Wait until all that were told have left. One that does not know that it should costs the
        whole time."""
        deadline = time.monotonic() + timeout_s
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        num_here = self.num_told
        while num_here > 0 and (left_s := deadline - time.monotonic()) > 0:
            for monitor, _ in poller.poll(int(left_s * 1000)):
                monitor.recv_multipart()
                num_here -= 1
        for socket, monitor in zip(self._sockets, self._monitors, strict=True):
            socket.disable_monitor()
            monitor.close(linger=0)
