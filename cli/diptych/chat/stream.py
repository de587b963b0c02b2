"""Reads one streamed chat completion."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from diptych.answer_stream import AnswerError, whole_events
from diptych_protocol import UNREADABLE

TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=10.0, pool=5.0)


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


def read_event(data: bytes) -> Piece:
    """Parse the payload of an event. Raises `AnswerError` for errors and invalid data."""
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except UNREADABLE as exc:
        raise AnswerError(f"the service sent something that is no chat chunk: {exc}") from exc
    if chunk.error is not None:
        raise AnswerError(chunk.error.message)
    text = "".join(choice.delta.content or "" for choice in chunk.choices[:1])
    return Piece(text, chunk.usage.completion_tokens if chunk.usage else None)


async def stream_chat(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> AsyncIterator[Piece]:
    """Yield the pieces of one chat completion as they arrive. Raises `AnswerError`."""
    async for events in whole_events(client, f"{url}/chat/completions", body):
        for line in events.splitlines():
            field, _, data = line.partition(b":")
            if field == b"data" and (data := data.strip()) != b"[DONE]":
                yield read_event(data)
