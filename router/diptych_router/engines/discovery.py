"""Turns `host:port` targets into the addresses of engines, one for every A record.

In Kubernetes a target is a pool's headless Service, whose records are its ready pods. On a laptop
it is one engine's loopback address.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from diptych_protocol import InvalidRequestError

log = logging.getLogger(__name__)

_resolvers = ThreadPoolExecutor(2, thread_name_prefix="resolve")
"""Threads for discovery alone, because a resolver that does not answer blocks a thread for seconds.
There is one for each pool, because the pools look for engines independently of each other."""

Target = tuple[str, int]

RESOLVE_TIMEOUT_S = 5.0


def parse_targets(text: str) -> list[Target]:
    """Parse a comma-separated list. Raises `InvalidRequestError` naming the bad part."""
    targets: list[Target] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidRequestError(f"target {part!r} is not host:port", param="targets")
        targets.append((host.strip("[]"), int(port)))
    if not targets:
        raise InvalidRequestError("no targets: give host:port[,host:port...]", param="targets")
    return targets


async def resolve(targets: list[Target]) -> set[str] | None:
    """Return the ZMQ endpoints behind all targets.

    A name that does not exist (yet) stands for no address. None: the resolver itself failed, or
    does not answer, so that an outage of DNS does not look like an empty pool.
    """
    endpoints: set[str] = set()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            for host, port in targets:
                endpoints |= await _addresses(host, port)
    except (socket.gaierror, TimeoutError) as exc:
        log.debug("cannot resolve %s: %s", targets, exc)
        return None
    return endpoints


async def _addresses(host: str, port: int) -> set[str]:
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        infos = await asyncio.get_running_loop().run_in_executor(_resolvers, look_up)
    except socket.gaierror as exc:
        if exc.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return set()
        raise
    ips = (f"[{at[0]}]" if family == socket.AF_INET6 else at[0] for family, _, _, _, at in infos)
    return {f"tcp://{ip}:{port}" for ip in ips}
