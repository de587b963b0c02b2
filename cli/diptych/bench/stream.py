"""Sends one request and measures the time of each piece of the streamed answer.

While an answer arrives, the client only notes each piece and its time. It parses the answer
afterwards, because it may share its processor with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from diptych.answer_stream import AnswerError, one_line, whole_events
from diptych_protocol import UNREADABLE

MAX_ANSWER_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its user saw it. Times are in seconds."""

    ttft_s: float
    gaps_s: list[float]
    """The pauses between events with tokens."""
    output_tokens: int
    cached_tokens: int | None = None
    """Tokens of the prompt that were in a prefix cache; None if the server does not report them."""
    prompt_tokens: int | None = None
    """None if the server does not report it; then `output_tokens` is the number of events."""

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return sum(self.gaps_s) / max(1, self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From the request to the last token."""
        return self.ttft_s + sum(self.gaps_s)


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    """What a chat adds to the answer. Completions have `text` instead, which may be empty."""

    def brings_tokens(self) -> bool:
        said = self.delta
        return said is None or bool(
            said.content
            or said.reasoning
            or said.reasoning_content
            or said.tool_calls
            or said.refusal
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], timeout_s: float
) -> Sample:
    """POST a body, with fields that request a stream with its usage. Raises `AnswerError`."""
    pieces: list[tuple[float, bytes]] = []
    size = 0
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            async for events in whole_events(client, path, body):
                pieces.append((time.perf_counter() - started, events))
                size += len(events)
                if size > MAX_ANSWER_BYTES:
                    raise AnswerError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    except TimeoutError as exc:
        raise AnswerError(f"no end within {timeout_s:g} s") from exc
    return read_stream(pieces)


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> Sample:
    """Parse server-sent events from pieces cut anywhere, each with the time at which it came.

    Raises `AnswerError` if they are no whole answer.
    """
    times: list[float] = []
    usage: _Usage | None = None
    rest, whole = b"", False
    for when, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                whole = True
                continue
            event = _read(data)
            usage = event.usage or usage
            if any(choice.brings_tokens() for choice in event.choices or ()):
                times.append(when)
    if not whole:
        raise AnswerError("the stream broke off before its end")
    if not times:
        raise AnswerError("an answer without a token")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    if usage is None:
        return Sample(times[0], gaps, len(times))
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    return Sample(times[0], gaps, usage.completion_tokens, cached, usage.prompt_tokens)


def _read(data: bytes) -> _Event:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except UNREADABLE as exc:
        raise AnswerError(f"an event that is no chunk of an answer: {exc}") from exc
    if event.error is not None:
        raise AnswerError(f"an error in the stream: {one_line(str(event.error))}")
    return event
