"""Ports of 127.0.0.1."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from diptych.laptop.pods import LOOPBACK


def free_ports(count: int) -> list[int]:
    """That many different ports that nobody listens on now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server can listen there now. Raises `socket.gaierror` for a host that is none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError:
            return False
        return True
