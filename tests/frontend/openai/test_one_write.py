"""The head of an answer and its body are one write; a head does not wait for a body for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from served import serve_http
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from waits import PATIENCE_S

from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import PARTS_KEY, Exchange

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
BODY = {"type": "http.response.body", "body": b"body"}


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of the app."""
    ready: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve_http(app, "127.0.0.1", 0, on_ready=lambda *address: ready.set_result(address))
    )
    reader, writer = await asyncio.open_connection(*await ready, limit=1 << 26)
    try:
        yield reader, writer
    finally:
        writer.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the server hands to the connection's transport, write by write."""
    seen: list[bytes] = []
    connected = httptools_impl.HttpToolsProtocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        connected(self, Listening(transport, seen))  # type: ignore[arg-type]

    monkeypatch.setattr(httptools_impl.HttpToolsProtocol, "connection_made", connection_made)
    return seen


class Listening:
    """A real transport whose writes are noted."""

    def __init__(self, transport: asyncio.Transport, seen: list[bytes]) -> None:
        self._transport = transport
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._seen.append(data)
        self._transport.write(data)


async def read_until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(end), PATIENCE_S)


async def test_an_answer_is_one_write_again_and_again(writes: list[bytes]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(HEAD)
        await send(BODY)

    async with serving(app) as (reader, writer):
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await read_until(reader, b"body")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(writes) == 3


async def test_events_of_a_stream_go_out_one_by_one(writes: list[bytes]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**HEAD, "headers": []})
        for text in (b"one", b"two", b"three"):
            await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body"})

    async with serving(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await read_until(reader, b"\r\n0\r\n\r\n")
    assert answer == b"".join(writes)
    assert writes[0].endswith(b"\r\n\r\n3\r\none\r\n")
    assert writes[1:] == [b"3\r\ntwo\r\n", b"5\r\nthree\r\n", b"0\r\n\r\n"]


async def test_parts_need_no_coroutine_while_the_client_reads() -> None:
    part, sent = b"x" * 65536, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        parts = scope[PARTS_KEY]
        await send({**HEAD, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        parts.write(b"")
        while parts.may_write():
            parts.write(part)
            sent += 1
        await send({"type": "http.response.body", "body": b"last"})

    async with serving(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await read_until(reader, b"\r\n\r\n3\r\none\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        rest = await read_until(reader, b"4\r\nlast\r\n0\r\n\r\n")
    assert sent
    assert rest == b"10000\r\n%b\r\n" % part * sent + b"4\r\nlast\r\n0\r\n\r\n"


async def test_a_head_does_not_wait_for_a_body_that_is_late() -> None:
    asked = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(HEAD)
        await asked.wait()
        await send(BODY)

    async with serving(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await read_until(reader, b"\r\n\r\n")
        asked.set()
        assert await read_until(reader, b"body") == b"body"


async def test_an_answer_without_a_body_has_its_head() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(HEAD)
        await send(BODY)

    async with serving(app) as (reader, writer):
        for last in (False, True):
            close = b"connection: close\r\n" if last else b""
            writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\n%b\r\n" % close)
            assert b"content-length: 4" in await read_until(reader, b"\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send(HEAD)
        await send({**BODY, "body": body})

    async with serving(app) as (reader, writer):
        writer.write(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n"
        )
        assert await read_until(reader, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ping")
        assert (await read_until(reader, b"ping")).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_lost_connection_ends_what_runs_for_it_without_a_task_that_waits(
    is_late: bool,
) -> None:
    """Also where its body was so large that nothing more was read. is_late: it was lost before
    anybody asked."""
    began, lost, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    body = bytes(4 * HIGH_WATER_LIMIT)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        num_tasks = len(asyncio.all_tasks())
        while (await receive())["more_body"]:
            pass
        parts = scope[PARTS_KEY]
        began.set()
        if is_late:
            parts.watch(lost.set)
            await lost.wait()
        with UntilDisconnect(receive, Exchange("r", parts=parts)) as client:
            assert len(asyncio.all_tasks()) <= num_tasks
            await asyncio.Event().wait()
        assert client.gone
        ended.set()

    async with serving(app) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
            writer.close()
            await ended.wait()
