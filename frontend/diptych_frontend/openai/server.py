"""The HTTP server around the app: listen, drain on SIGTERM, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than load balancers and pooled clients keep idle connections, so that it is they who
close, and no request races with a close of ours."""
CANCEL_TIMEOUT_S = 5.0
"""How long requests may take to end after the drain timeout cancelled them."""

OnReady = Callable[[str, int], None]
"""Called with the bound host and port once connections are accepted."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Exits with a one-line message and code 1 if the address cannot be had, so call it before
    anything slow is started.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual
        )
    except (OSError, OverflowError, UnicodeError) as exc:
        remedy = "choose another port, or stop what listens there" if port else "check the host"
        code = exc.errno if isinstance(exc, OSError) else None
        # Positive codes are the system's; those of name resolution are negative.
        reason = os.strerror(code) if code and code > 0 else exc
        raise SystemExit(f"cannot listen on {host}:{port}: {reason}; {remedy}") from None
    listener.setblocking(False)
    return listener


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    drain_timeout_s: float = 30.0,
    on_ready: OnReady | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation; see `listen` and `serve_on`."""
    await serve_on(app, listen(host, port), drain_timeout_s=drain_timeout_s, on_ready=on_ready)


async def serve_on(
    app: ASGIApp,
    listener: socket.socket,
    *,
    drain_timeout_s: float = 30.0,
    on_ready: OnReady | None = None,
) -> None:
    """Serve on a listening socket until SIGTERM, SIGINT or cancellation, then drain.

    Draining: no new connections; answers under way may finish for `drain_timeout_s`; what is left
    is then cancelled, which tells each client that the server shuts down. A second signal skips
    the wait. Signals are only handled in the main thread.
    """
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        # uvicorn's own type is whole seconds, but it only hands this on to asyncio.wait_for.
        timeout_graceful_shutdown=drain_timeout_s,  # type: ignore[arg-type]
    )
    server = _Server(config, on_ready)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with _exit_on_signals(server):
            await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await asyncio.wait((serving,))
        raise
    finally:
        await server.end_requests()
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, and leaves signals to us (it would raise them again)."""

    def __init__(self, config: uvicorn.Config, on_ready: OnReady | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_ready is not None and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(host, port)

    def request_exit(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def end_requests(self) -> None:
        """Wait for cancelled requests to say goodbye; uvicorn itself does not."""
        tasks = set(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)


@contextlib.contextmanager
def _exit_on_signals(server: _Server) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, server.request_exit)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
