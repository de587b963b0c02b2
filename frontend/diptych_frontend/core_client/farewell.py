"""The last moments of a core's sockets: its clients read its last words before they are closed.

A client's ZMQ (with `ZMQ_IMMEDIATE`) drops what it has received and its program has not read yet,
as soon as it sees the connection end. So the core waits until its clients have left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq


class Farewell:
    """Watches clients leave. Make it before they are told, so that none is missed."""

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
