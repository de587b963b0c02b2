"""Ports for processes that are told where to listen.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = iter(random.SystemRandom().sample(range(12_000, 30_000), 5000))
"""Below those that Linux gives to outgoing connections and to whoever does not care."""


def free_port() -> int:
    """A port that nobody listens on, and that nobody is given until its owner has started, or while
    it is started again; never the same one twice."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port
    raise RuntimeError("no port is free")
