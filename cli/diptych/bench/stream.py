"""Sends one request and measures the time of each piece of the streamed answer.

While an answer arrives, the client only notes each piece and its time. It parses the answer
afterwards, because it may share its processor with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import httpx

from diptych.answer_stream import AnswerError, Usage, chunks_of, whole_events

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


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], timeout_s: float
) -> Sample:
    """POST a body, with fields that request a stream with its usage. Raises `AnswerError`."""
    pieces: list[tuple[float, bytes]] = []
    size = 0
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s), aclosing(whole_events(client, path, body)) as coming:
            async for events in coming:
                pieces.append((time.perf_counter() - started, events))
                size += len(events)
                if size > MAX_ANSWER_BYTES:
                    raise AnswerError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    except TimeoutError as exc:
        raise AnswerError(f"no end within {timeout_s:g} s") from exc
    return read_stream(pieces)


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> Sample:
    """Read the events of a whole answer, each piece of them with the time at which it came.

    Raises `AnswerError` as `chunks_of`, and for an answer without a token.
    """
    times: list[float] = []
    usage: Usage | None = None
    for when, events in pieces:
        for chunk in chunks_of(events):
            usage = chunk.usage or usage
            if chunk.brings_tokens:
                times.append(when)
    if not times:
        raise AnswerError("an answer without a token")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    if usage is None:
        return Sample(times[0], gaps, len(times))
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    return Sample(times[0], gaps, usage.completion_tokens, cached, usage.prompt_tokens)
