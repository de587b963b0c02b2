"""The HTTP server around the app: it listens, drains on SIGTERM, and cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from diptych_frontend.observability.loop_watch import LoopWatch
from diptych_frontend.openai.connection_limits import Connections, LimitedProtocol
from diptych_frontend.openai.exchange import WRITE_TIMEOUT_S

BACKLOG = 256
"""Connections that arrive together are accepted together, and each takes the event loop about 0.1
ms."""
KEEP_ALIVE_S = 75
"""Longer than load balancers and pooled clients keep idle connections, so that they close first,
and no request meets a connection that we are closing."""
CANCEL_TIMEOUT_S = 5.0
"""How long requests may take to end after the drain timeout cancelled them."""
DRAIN_TIMEOUT_S = 30.0
LAST_WORDS_S = 0.2
"""The least time for answers after connections are refused, however long the drain took."""
SWITCH_INTERVAL_S = 0.0005
"""How long Python code of another thread may block the event loop at a time."""
TICKS_A_SWEEP = 10
"""Each tick checks a tenth of the connections, because closing many at once takes long."""

OnReady = Callable[[str, int], None]
"""Called with the bound host and port once connections are accepted."""
OnLag = Callable[[float], object]
"""Called ten times a second with the lag of the event loop, in seconds."""
Drain = Callable[[], Awaitable[None]]
"""Called at the first signal; returns when nothing is left to do."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Exits with a one-line message and code 1 if the address is not available, so call it before
    anything slow is started.
    """
    with _or_exit(host, port):
        family, address, dual = _address(host, port)
        listener = socket.create_server(
            address, family=family, backlog=BACKLOG, dualstack_ipv6=dual
        )
    listener.setblocking(False)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # What the system has taken of an answer, it too keeps no longer for who reads nothing.
        milliseconds = int(WRITE_TIMEOUT_S * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


def _address(host: str, port: int) -> tuple[int, tuple[str, int], bool]:
    """Family and address of a socket, and whether it is one for both versions of IP."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return family, (str(address[0]), int(address[1])), dual


@contextlib.contextmanager
def _or_exit(host: str, port: int) -> Iterator[None]:
    """Turn what keeps a socket from its address into the end of the program."""
    try:
        yield
    except (OSError, OverflowError, UnicodeError) as exc:
        remedy = "choose another port, or stop what listens there" if port else "check the host"
        code = exc.errno if isinstance(exc, OSError) else None
        # Positive codes are the system's; those of name resolution are negative.
        reason = os.strerror(code) if code and code > 0 else exc
        raise SystemExit(f"cannot listen on {host}:{port}: {reason}; {remedy}") from None


@dataclass(frozen=True, slots=True)
class Site:
    """An app, and the listening socket that it is served on."""

    app: ASGIApp
    listener: socket.socket
    tls: ssl.SSLContext | None = None
    """None: the site uses plain HTTP."""


async def serve_sites(
    *sites: Site,
    drain: Drain | None = None,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    on_ready: OnReady | None = None,
    on_lag: OnLag = lambda lag: None,
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation, then end. Without sites there is only `drain`.

    At the end, all sites are served as before until `drain` returns. Then no new connections are
    accepted, and running answers may finish. `drain_timeout_s` is the limit for both together.
    After it, the rest is cancelled, and each client is told that the server shuts down. A second
    signal skips the wait. Signals are handled in the main thread only; cancellation skips `drain`.

    Args:
        drain: empties the server. It is cancelled when time is over; what it raises ends the
            serving, and is raised from here.
        on_ready: called with the address of the first site.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with LoopWatch(on_lag) as watch:
        connections = Connections.of_this_process()
        servers = [
            _Server(site, connections, drain_timeout_s, on_ready if site is sites[0] else None)
            for site in sites
        ]
        if servers:
            servers[0].on_each_tick = watch.tick
        with _signals() as signals:
            await _serve(servers, signals, drain, drain_timeout_s)


async def serve_aside(site: Site) -> None:
    """Serve until cancellation, in a program that has its own loop and handles its own signals."""
    server = _Server(site, Connections.of_this_process(), LAST_WORDS_S, None)
    await _serve([server], asyncio.Queue(), None, LAST_WORDS_S)


async def _serve(
    servers: Sequence[_Server],
    signals: asyncio.Queue[None],
    drain: Drain | None,
    drain_timeout_s: float,
) -> None:
    serving = [asyncio.create_task(server.serve(sockets=[server.listener])) for server in servers]
    leaving: asyncio.Task[None] | None = None
    try:
        leaving = asyncio.create_task(_leave(servers, signals, drain, drain_timeout_s))
        await asyncio.wait((*serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            leaving.result()
        if serving:
            await asyncio.wait(serving)
    finally:
        if leaving is not None:
            leaving.cancel()
        for server in servers:
            server.should_exit = True
        if serving:
            await asyncio.wait(serving)
        for server in servers:
            await server.end_requests()
            server.listener.close()
    for task in serving:
        task.result()


async def _leave(
    servers: Sequence[_Server], signals: asyncio.Queue[None], drain: Drain | None, timeout_s: float
) -> None:
    """The way out, from the first signal on. Returns when there is no time left."""
    await signals.get()
    deadline = time.monotonic() + timeout_s
    hurry = asyncio.create_task(signals.get())
    try:
        if drain is not None:
            await _bounded(drain, hurry, timeout_s)
        for server in servers:
            server.leave(within_s=max(LAST_WORDS_S, deadline - time.monotonic()))
        if servers:
            await hurry
        for server in servers:
            server.force_exit = True
    finally:
        hurry.cancel()


async def _bounded(drain: Drain, hurry: asyncio.Task[None], timeout_s: float) -> None:
    draining = asyncio.ensure_future(drain())
    try:
        await asyncio.wait(
            (draining, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if draining.done():
            draining.result()
    finally:
        draining.cancel()


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, and leaves signals to us (it would raise them again)."""

    def __init__(
        self, site: Site, connections: Connections, drain_timeout_s: float, on_ready: OnReady | None
    ) -> None:
        config = uvicorn.Config(
            site.app,
            http=partial(LimitedProtocol, connections),  # type: ignore[arg-type]
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here asks who the client is
            timeout_keep_alive=KEEP_ALIVE_S,
            # uvicorn's own type is whole seconds, but it only hands this on to asyncio.wait_for.
            timeout_graceful_shutdown=drain_timeout_s,  # type: ignore[arg-type]
        )
        if (tls := site.tls) is not None:
            config.ssl_context_factory = lambda config, default: tls
        super().__init__(config)
        self.listener = site.listener
        self.on_each_tick: Callable[[], None] = lambda: None
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_ready is not None and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(host, port)

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn does ten times a second."""
        self.on_each_tick()
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections)[
            counter % TICKS_A_SWEEP :: TICKS_A_SWEEP
        ]:
            connection.sweep(now)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    def leave(self, within_s: float) -> None:
        """Take no more connections, and give the answers under way this long."""
        self.config.timeout_graceful_shutdown = within_s  # type: ignore[assignment]
        self.should_exit = True

    async def end_requests(self) -> None:
        """Wait for cancelled requests to say goodbye; uvicorn itself does not."""
        tasks = set(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
        for connection in list(self.server_state.connections):
            if connection.transport.get_write_buffer_size():
                connection.transport.abort()  # its client does not read


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[None]]:
    """Every SIGTERM and SIGINT, in the main thread; in others none."""
    arrived: asyncio.Queue[None] = asyncio.Queue()
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, arrived.put_nowait, None)
    try:
        yield arrived
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
