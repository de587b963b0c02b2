"""Reads one streamed chat completion."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from diptych_protocol import UNREADABLE

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


async def stream_chat(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> AsyncIterator[Piece]:
    """Yield the pieces of one chat completion as they arrive. Raises `ChatError`."""
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", f"{url}/chat/completions", json=request) as response:
            if response.status_code != 200:
                raise ChatError(_refusal(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                field, _, data = line.partition(":")
                if field != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                yield read_event(data)
    except httpx.HTTPError as exc:
        raise ChatError(f"{url} is out of reach: {exc or type(exc).__name__}") from exc
    except UnicodeEncodeError as exc:
        raise ChatError(f"a text that was given is no valid text: {exc}") from exc
    raise ChatError("the stream broke off before its end")


def _refusal(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except UNREADABLE:
        error = None
    return f"HTTP {status}: {error.message if error else body[:200].decode(errors='replace')}"
