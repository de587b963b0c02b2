"""Streams of answers over HTTP, which go on with another router where theirs is lost."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Final

import httpx
import msgspec

from diptych.router_admin import message_of
from diptych_protocol import UNREADABLE

GO_ON_S: Final = 10.0
"""How long a service whose router is gone may take to answer by another one."""
PAUSE_S: Final = 0.3
MAX_EVENT_BYTES: Final = 4 << 20
MAX_ERROR_CHARS: Final = 300
HEADERS: Final = {"accept-encoding": "identity", "x-diptych-resumable": "1"}
"""A compressed answer could not be read piece by piece; events with ids can be asked for again."""
_ID: Final = re.compile(rb"^id: *(.*)$", re.MULTILINE)
_TEXT: Final = re.compile(rb'"(?:content|text)": *"[^"]')
_END: Final = re.compile(rb"^data: *\[DONE\]\s*\Z", re.MULTILINE)


class AnswerError(RuntimeError):
    """There was no whole answer. `str()` says why in one line."""


class _BrokenOffError(AnswerError):
    """The connection ended; the rest of the answer may be had by another one."""


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    """What a chat adds to the answer. Completions have `text` instead, which may be empty."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """What it adds to the text of the first answer to a chat."""
        said = self.choices[0].delta if self.choices else None
        return said.content if said is not None and isinstance(said.content, str) else ""

    @property
    def brings_tokens(self) -> bool:
        deltas = (choice.delta for choice in self.choices or ())
        return any(said is None or any(msgspec.structs.astuple(said)) for said in deltas)


async def whole_events(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncGenerator[bytes]:
    """POST a body, with fields that request a stream with its usage, and yield its events as they
    come, one or several at a time. Who reads no further has to close it. Raises `AnswerError`."""
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    headers, give_up_at = {**HEADERS}, 0.0
    while True:
        try:
            async with aclosing(_events(client, path, request, headers)) as coming:
                async for events in coming:
                    if ids := _ID.findall(events):
                        headers["last-event-id"], give_up_at = ids[-1].decode(), 0.0
                    elif "last-event-id" in headers and _TEXT.search(events):
                        raise AnswerError("the stream broke off, and no router has its rest")
                    yield events
            return
        except _BrokenOffError:
            give_up_at = give_up_at or time.monotonic() + GO_ON_S
            if "last-event-id" not in headers or time.monotonic() > give_up_at:
                raise
        await asyncio.sleep(PAUSE_S)


async def stream_chat(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> AsyncGenerator[Chunk]:
    """Yield the pieces of one chat completion as they arrive. Raises `AnswerError`."""
    async with aclosing(whole_events(client, f"{url}/chat/completions", body)) as coming:
        async for events in coming:
            for chunk in chunks_of(events):
                yield chunk


def chunks_of(events: bytes) -> Iterator[Chunk]:
    """Yield what whole events say. Raises `AnswerError` for an error, and for what is none of an
    answer."""
    for line in events.splitlines():
        field, _, data = line.partition(b":")
        if field == b"data" and (data := data.strip()) != b"[DONE]":
            try:
                chunk = msgspec.json.decode(data, type=Chunk)
            except UNREADABLE as exc:
                raise AnswerError(f"an event that is no chunk of an answer: {exc}") from exc
            if chunk.error is not None:
                raise AnswerError(f"an error in the stream: {one_line(message_of(data))}")
            yield chunk


async def _events(
    client: httpx.AsyncClient, path: str, request: dict[str, Any], headers: dict[str, str]
) -> AsyncGenerator[bytes]:
    """Yield the events of one connection, until the stream's proper end. Raises `AnswerError`."""
    events = rest = b""
    try:
        async with client.stream("POST", path, json=request, headers=headers) as response:
            if response.status_code != 200:
                lost = response.status_code in (502, 503, 504)
                raise (_BrokenOffError if lost else AnswerError)(await _refusal(response))
            async for piece in response.aiter_raw():
                events, end, rest = (rest + piece).replace(b"\r\n", b"\n").rpartition(b"\n\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise AnswerError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
                if events := events + end:
                    yield events
    except httpx.HTTPError as exc:
        raise _BrokenOffError(f"{path} is out of reach: {exc or type(exc).__name__}") from exc
    except UnicodeError as exc:
        raise AnswerError(f"a text that was given is no valid text: {exc}") from exc
    if not _END.search(rest or events):
        raise _BrokenOffError("the stream broke off before its end")
    if rest:
        yield rest


async def _refusal(response: httpx.Response) -> str:
    said = b""
    async for piece in response.aiter_bytes():
        said += piece
        if len(said) > 4 * MAX_ERROR_CHARS:
            break
    return f"HTTP {response.status_code}: {one_line(message_of(said))}"


def one_line(text: str) -> str:
    """As much of a text as a line of a table may have."""
    return " ".join(text.split())[:MAX_ERROR_CHARS]
