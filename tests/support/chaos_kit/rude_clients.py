"""Clients that mean harm, each kind in a process of its own, and what they got.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection

from chaos_kit.large_requests import LargeRequest

ADDRESS = "127.0.0.2"
"""Not that of the polite clients: clients without keys are told apart by their addresses."""
AT_ONCE, PAUSE_S = 2, 0.2
Outcomes = Counter[str]
Rudeness = Callable[[int, Outcomes], Awaitable[None]]
"""Goes on until it is cancelled: with the port, and where to count what became of its doings."""


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(ADDRESS, 0))


class SendLarge:
    """Sends the same large request again and again, over several connections."""

    def __init__(self, request: LargeRequest) -> None:
        self._bytes = (
            f"POST {request.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(request.body)}\r\nConnection: close\r\n\r\n".encode()
            + request.body
        )

    async def __call__(self, port: int, outcomes: Outcomes) -> None:
        await asyncio.gather(*(self._send_on(port, outcomes) for _ in range(AT_ONCE)))

    async def _send_on(self, port: int, outcomes: Outcomes) -> None:
        while True:
            status = "cut off"
            with contextlib.suppress(ConnectionError):
                reader, writer = await connect(port)
                writer.write(self._bytes)
                line = await reader.readline()
                status = line[9:12].decode() or status
                writer.close()
            outcomes[status] += 1
            await asyncio.sleep(PAUSE_S)


async def half_a_line(port: int, outcomes: Outcomes) -> None:
    """2,000 connections that say half a line, and again when they are closed."""

    async def one() -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                reader, writer = await connect(port)
                writer.write(b"GET /v1/mo")
                line = await reader.readline()
                outcomes[line[9:12].decode() or "closed"] += 1
                writer.close()

    await asyncio.gather(*(one() for _ in range(2000)))


async def endless_headers(port: int, outcomes: Outcomes) -> None:
    """400 MB of headers, over several connections each."""
    header = b"X-Filler: " + b"y" * 8000 + b"\r\n"

    async def one() -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                reader, writer = await connect(port)
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
                for _ in range(50_000):
                    if writer.transport.is_closing() or reader.at_eof():
                        break
                    writer.write(header)
                    outcomes["bytes"] += len(header)
                    await writer.drain()
                writer.transport.abort()
            outcomes["connections"] += 1

    await asyncio.gather(*(one() for _ in range(8)))


async def stalled_readers(port: int, outcomes: Outcomes) -> None:
    """1,000 connections, come within 30 s, that ask eight times and read nothing of the answers."""
    loop = asyncio.get_running_loop()

    async def one(begins_after_s: float) -> None:
        await asyncio.sleep(begins_after_s)
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.bind((ADDRESS, 0))
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 8)
        outcomes["open"] += 1
        while not client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            await asyncio.sleep(1)
        client.close()
        outcomes["cut off"] += 1

    await asyncio.gather(*(one(i * 0.03) for i in range(1000)))


@contextlib.asynccontextmanager
async def rudeness(rude: Rudeness, port: int) -> AsyncIterator[Callable[[], Outcomes]]:
    """While the block lasts, a process is rude; what it got is known when that has ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_rude, args=(rude, port, theirs), daemon=True)
    outcomes: Outcomes = Counter()

    def start() -> None:
        process.start()
        ours.recv()

    def stop() -> None:
        ours.send("enough")
        with contextlib.suppress(EOFError):
            outcomes.update(ours.recv())
        process.join(10)
        process.kill()

    await asyncio.to_thread(start)  # whoever measures meanwhile is not to be held up
    try:
        yield lambda: outcomes
    finally:
        await asyncio.to_thread(stop)


def _be_rude(rude: Rudeness, port: int, parent: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    outcomes: Outcomes = Counter()

    async def main() -> None:
        task = asyncio.ensure_future(rude(port, outcomes))
        parent.send("started")
        enough = asyncio.to_thread(parent.recv)
        await asyncio.wait((task, asyncio.ensure_future(enough)), return_when="FIRST_COMPLETED")
        task.cancel()
        parent.send(outcomes)
        await asyncio.wait((task,))

    asyncio.run(main())
