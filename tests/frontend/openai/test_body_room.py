"""Memory for bodies that arrive: bounded in all and for each client, and given back."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.openai import asgi
from diptych_frontend.openai.asgi import SMALL_BYTES, BodyRoom
from diptych_protocol import EngineOverloadedError

MOST = 1 << 20


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, MOST // 3), max_size=4)),
        max_size=12,
    )
)
def test_what_is_held_stays_within_bounds_and_is_given_back(
    bodies: list[tuple[str, list[int]]],
) -> None:
    room = BodyRoom(MOST)
    held: list[tuple[str, int]] = []
    for client, pieces in bodies:
        size = 0
        for piece in pieces:
            size += piece
            try:
                room.arrived(client, size - piece, size)
            except EngineOverloadedError:
                room.ended(client, size)
                break
            large = [each for each in [*held, (client, size)] if each[1] > SMALL_BYTES]
            assert sum(each for _, each in large) <= MOST
            assert sum(each for whose, each in large if whose == client) <= MOST // 2
        else:
            held.append((client, size))
    for client, size in held:
        room.ended(client, size)
    room.arrived("a", 0, MOST // 2)
    room.arrived("b", 0, MOST // 2)


async def test_small_bodies_pass_while_large_ones_are_refused(
    engine: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi.BodyRoom.__init__, "__defaults__", (64 << 10,))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    async with serve(build_app(engine)) as url, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head + b"x" * (40 << 10))
        assert b" 503 " in await reader.readline()
        writer.close()
        body = {"model": "echo", "prompt": "abc", "max_tokens": 2}
        answer = await client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200
        answer = await client.post(f"{url}/v1/completions", json=body | {"user": "u" * 30_000})
        assert answer.status_code == 200, "what the refused body took was given back"


async def test_a_body_is_not_kept_as_long_as_its_answer_takes(
    engine: Any, serve: Any, eventually: Any
) -> None:
    engine.gate.clear()
    request = b'{"model": "echo", "prompt": "a", "max_tokens": 1}'
    size, piece = 3 << 20, b" " * (64 << 10)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % size
    async with serve(build_app(engine)) as url:
        address = httpx.URL(url)
        connections = []
        tracemalloc.start()
        try:
            for number in range(1, 7):
                connection = await asyncio.open_connection(address.host, address.port)
                connections.append(connection)
                writer = connection[1]
                writer.write(head + request)
                for start in range(len(request), size, len(piece)):
                    writer.write(piece[: size - start])
                    await writer.drain()
                await eventually(lambda number=number: len(engine.seen) == number)
            await eventually(lambda: tracemalloc.get_traced_memory()[0] < size)
        finally:
            tracemalloc.stop()
        engine.gate.set()
        for reader, writer in connections:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()


async def test_what_open_requests_keep_of_their_bodies_is_bounded(
    engine: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(asgi.BodyRoom.__init__, "__defaults__", (MOST,))
    engine.gate.clear()
    asked = {"model": "echo", "prompt": "a", "max_tokens": 1, "user": "x" * (MOST // 3)}
    async with serve(build_app(engine)) as url, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        first = asyncio.create_task(client.post(f"{url}/v1/completions", json=asked))
        await eventually(lambda: engine.seen)
        assert (await client.post(f"{url}/v1/completions", json=asked)).status_code == 503
        engine.gate.set()
        assert (await first).status_code == 200
        assert (await client.post(f"{url}/v1/completions", json=asked)).status_code == 200
