"""Chooses free ports of 127.0.0.1."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Container, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from diptych.laptop.pods import LOOPBACK
from diptych_frontend.processors import text_if_there

LOCAL_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
NODE_PORTS: Final = 30_000
"""A Kubernetes on this machine may redirect connections to this port and those above it."""
LOWEST, LEAST = 20_000, 2_000
"""Ports below LOWEST are those of well-known programs. LEAST ports are enough for any laptop."""
_TRIES: Final = 1000


def free_ports(runs: Iterable[int], besides: Container[int] = ()) -> list[int]:
    """Return different ports that nobody listens on now and that are not in `besides`: for each
    run, this many adjacent ones, one run after the other. Raises `OSError` if there are none."""
    with ExitStack() as held:
        return [port for length in runs for port in _free_run(held, length, besides)]


def _free_run(held: ExitStack, length: int, besides: Container[int]) -> range:
    """Ports that stay taken as long as `held`."""
    ours = lasting_ports(text_if_there(LOCAL_PORTS))
    for _ in range(_TRIES if length <= len(ours) else 0):
        begin = random.choice(ours[: len(ours) - length + 1])
        found = range(begin, begin + length)
        if any(port in besides for port in found):
            continue
        with ExitStack() as run:
            if all(_taken(run, port) for port in found):
                held.enter_context(run.pop_all())
                return found
    raise OSError(f"no {length} ports are free that are neighbours")


def lasting_ports(local: str) -> range:
    """Return the ports that stay free between their choice and their use, and while a pod restarts.

    local: the content of `LOCAL_PORTS`, the range from which Linux assigns ports automatically. If
    almost none are left below that range, all ports are returned.
    """
    first, *_ = local.split() or [""]
    end = min(int(first), NODE_PORTS) if first.isdecimal() else NODE_PORTS
    return range(LOWEST, end) if end >= LOWEST + LEAST else range(LOWEST, 1 << 16)


def _taken(run: ExitStack, port: int) -> bool:
    try:
        run.enter_context(socket.socket()).bind((LOOPBACK, port))
    except (OSError, OverflowError):  # the latter for what is no port
        return False
    return True


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server can listen there now; not, if something does. Raises `OSError` if it
    never can: the host is unknown or another machine, or the user may not have the port."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
            return False
        return True
