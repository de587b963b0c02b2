"""Ports of 127.0.0.1."""

from __future__ import annotations

import socket
from collections.abc import Container, Iterable
from contextlib import ExitStack
from typing import Final

from diptych.laptop.pods import LOOPBACK

_TRIES: Final = 1000


def free_ports(runs: Iterable[int], besides: Container[int] = ()) -> list[int]:
    """Different ports that nobody listens on now, and none of `besides`: for each run so many
    neighbours, one run behind the other. Raises `OSError` if there are none."""
    with ExitStack() as held:
        return [port for length in runs for port in _free_run(held, length, besides)]


def _free_run(held: ExitStack, length: int, besides: Container[int]) -> range:
    """Ports that stay taken as long as `held`."""
    for _ in range(_TRIES):
        with ExitStack() as run:
            first = run.enter_context(socket.socket())
            first.bind((LOOPBACK, 0))
            begin: int = first.getsockname()[1]
            found = range(begin, begin + length)
            if any(port in besides for port in found):
                continue
            if all(_taken(run, port) for port in found[1:]):
                held.enter_context(run.pop_all())
                return found
    raise OSError(f"no {length} ports are free that are neighbours")


def _taken(run: ExitStack, port: int) -> bool:
    try:
        run.enter_context(socket.socket()).bind((LOOPBACK, port))
    except (OSError, OverflowError):  # the latter for what is no port
        return False
    return True


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
