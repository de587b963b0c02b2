"""How `diptych bench` reads an answer: times, tokens, and what is no whole answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych.answer_stream import MAX_EVENT_BYTES, AnswerError, whole_events
from diptych.bench.stream import Sample, read_stream

DONE = b"data: [DONE]\n\n"
USAGE = {
    "completion_tokens": 3,
    "prompt_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def event(**fields: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps(fields).encode()


def chat(**delta: Any) -> bytes:
    return event(choices=[{"delta": delta}])


def completion(text: str = "a") -> bytes:
    return event(choices=[{"text": text}])


def test_times_are_those_of_the_pieces_that_end_an_event_with_tokens() -> None:
    answer = [
        chat(role="assistant", content=""),
        chat(reasoning_content="hm"),
        chat(content="a"),
        chat(tool_calls=[{"index": 0}]),
        event(choices=[{"delta": {}, "finish_reason": "stop"}]),
        event(choices=[], usage=USAGE),
        DONE,
    ]
    times = (0.5, 1.0, 1.5, 2.5, 2.6, 2.7, 2.8)
    sample = read_stream(list(zip(times, answer, strict=True)))
    assert sample == Sample(1.0, [0.5, 1.0], 3, 8, 9)
    assert (sample.tpot_s, sample.e2e_s) == (0.75, 2.5)


def test_every_event_of_a_completion_is_a_token_also_without_text() -> None:
    answer = [completion(), completion(""), event(choices=[], usage=USAGE), DONE]
    assert read_stream([(float(n), piece) for n, piece in enumerate(answer)]).gaps_s == [1.0]


def test_without_a_usage_events_are_counted() -> None:
    sample = read_stream([(1.0, chat(content="a")), (2.0, chat(content="b")), (3.0, DONE)])
    assert (sample.output_tokens, sample.prompt_tokens) == (2, None)


@given(st.lists(st.integers(1, 400), max_size=8))
def test_it_does_not_matter_where_a_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join([*(completion() for _ in range(4)), event(usage=USAGE), DONE])
    edges = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})

    async def sent() -> AsyncIterator[bytes]:
        for a, b in itertools.pairwise(edges):
            yield stream[a:b]

    answering = httpx.MockTransport(lambda _: httpx.Response(200, content=sent()))

    async def read() -> list[bytes]:
        async with httpx.AsyncClient(transport=answering, base_url="http://service") as client:
            return [events async for events in whole_events(client, "/v1/completions", {})]

    sample = read_stream([(float(n), events) for n, events in enumerate(asyncio.run(read()))])
    assert (sample.output_tokens, len(sample.gaps_s)) == (3, 3)


@each(
    ("answer", "said"),
    [
        ([DONE], "without a token"),
        ([event(error={"message": "no\nroom"}), DONE], "error in the stream: no room"),
        ([b"data: {nonsense\n\n", DONE], "no chunk of an answer"),
        ([b"data: \xff\n\n", DONE], "no chunk of an answer"),
        ([event(choices=3), DONE], "no chunk of an answer"),
        ([event(choices=[{"delta": 3}]), DONE], "no chunk of an answer"),
        ([event(usage={"completion_tokens": "many"}), DONE], "no chunk of an answer"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_that_says_why(answer: list[bytes], said: str) -> None:
    with pytest.raises(AnswerError, match=said):
        read_stream([(0.0, piece) for piece in answer])


async def test_an_event_without_an_end_is_not_kept() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield b"x" * (1 << 20)

    answering = httpx.MockTransport(lambda _: httpx.Response(200, content=endless()))
    async with httpx.AsyncClient(transport=answering, base_url="http://service") as client:
        with pytest.raises(AnswerError, match="an event of more than 4 MiB"):
            async for _ in whole_events(client, "/v1/completions", {}):
                pass
    assert sent <= MAX_EVENT_BYTES + (1 << 20)
