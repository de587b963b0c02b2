"""Ports for processes that are told where to listen.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket

_WORKERS, _EACH = 8, 1250
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_FIRST = 10_000 + _WORKER * _EACH
"""Every worker of pytest-xdist has a range of its own: a port seems free to all of them until its
owner has started. All are below those that Linux gives to outgoing connections and to whoever does
not care, and those that `diptych up` takes."""
_PORTS = iter(random.SystemRandom().sample(range(_FIRST, _FIRST + _EACH), _EACH))
_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and that nobody is given until its owner has started, or while
    it is started again; never the same one twice."""
    return first_of_free_ports(1)


def first_of_free_ports(number: int) -> int:
    """The first of so many neighbours that are free."""
    for port in _PORTS:
        neighbours = set(range(port, port + number))
        if not neighbours & _given and all(map(_is_free, neighbours)):
            _given.update(neighbours)
            return port
    raise RuntimeError("no port is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("0.0.0.0", port))
        return True
    return False
