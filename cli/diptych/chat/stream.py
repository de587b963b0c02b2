"""Reads one streamed chat completion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from diptych_protocol import UNREADABLE

GO_ON_S = 10.0
"""How long a service whose router is gone may take to answer by another one."""
PAUSE_S = 0.3
TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=10.0, pool=5.0)


class ChatError(Exception):
    """The service answered with an error or broke off. `str()` is one line for the user."""


class Piece(msgspec.Struct, frozen=True):
    """One event of a stream: some text, or the number of tokens."""

    text: str = ""
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = "unknown error"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


def read_event(data: str) -> Piece:
    """Parse the payload of a server-sent event. Raises `ChatError` for errors and invalid data."""
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except UNREADABLE as exc:
        raise ChatError(f"the service sent something that is no chat chunk: {exc}") from exc
    if chunk.error is not None:
        raise ChatError(chunk.error.message)
    text = "".join(choice.delta.content or "" for choice in chunk.choices[:1])
    return Piece(text, chunk.usage.completion_tokens if chunk.usage else None)


class _BrokenOffError(ChatError):
    """The connection ended; the rest of the answer may be had by another one."""


async def stream_chat(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> AsyncIterator[Piece]:
    """Yield the pieces of one chat completion as they arrive. A stream that breaks off goes on with
    another router of the service, if it has event ids. Raises `ChatError`."""
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    headers, give_up_at = {"x-diptych-resumable": "1"}, 0.0
    while True:
        try:
            async for event_id, piece in _events(client, url, request, headers):
                if event_id:
                    headers["last-event-id"], give_up_at = event_id, 0.0
                elif piece.text and "last-event-id" in headers:
                    raise ChatError("the stream broke off, and no router has its rest")
                yield piece
            return
        except _BrokenOffError:
            give_up_at = give_up_at or time.monotonic() + GO_ON_S
            if "last-event-id" not in headers or time.monotonic() > give_up_at:
                raise
        await asyncio.sleep(PAUSE_S)


async def _events(
    client: httpx.AsyncClient, url: str, request: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[tuple[str, Piece]]:
    """Yield each event, with its id, until the stream's proper end. Raises `ChatError`."""
    event_id, data, path = "", "", f"{url}/chat/completions"
    try:
        async with client.stream("POST", path, json=request, headers=headers) as response:
            status = response.status_code
            if status != 200:
                kind = _BrokenOffError if status in (502, 503, 504) else ChatError
                raise kind(_refusal(status, await response.aread()))
            async for line in response.aiter_lines():
                field, _, value = line.partition(":")
                if field == "id":
                    event_id = value.strip()
                elif field == "data" and (data := value.strip()) == "[DONE]":
                    return
                elif not line and data:
                    yield event_id, read_event(data)
                    data = ""
    except httpx.HTTPError as exc:
        raise _BrokenOffError(f"{url} is out of reach: {exc or type(exc).__name__}") from exc
    except UnicodeEncodeError as exc:
        raise ChatError(f"a text that was given is no valid text: {exc}") from exc
    raise _BrokenOffError("the stream broke off before its end")


def _refusal(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except UNREADABLE:
        error = None
    return f"HTTP {status}: {error.message if error else body[:200].decode(errors='replace')}"
