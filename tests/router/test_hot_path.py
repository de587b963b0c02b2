"""What a request costs the router, counted: calls of functions, from its bytes to its answer.

Counts are nearly the same on every machine, unlike times, so they can have ceilings; see
`benchmarks/call_path.py`. CONTRIBUTING.md says how to raise a ceiling.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from benchmarks.call_path import CHAT, COMPLETION, REQUESTS, STEP_MS, ask, routing, shortest

OWN_CEILINGS = {False: 363, True: 382}
"""Whether the answer is streamed -> calls of functions of ours for a request: 359 and 378."""

CEILINGS = {False: 1047, True: 1114}
"""The same with libraries' and built-in functions: 1020 and 1074, and 12 more each time that an
engine's message wakes the event loop up anew, once or twice in a request."""

TOKENS, TOKEN_CEILING = 40, 103
"""Tokens of the longer of two streams, and the most calls for a token, with the event loop's
part. It is 89 alone, and more beside other work, because heartbeats come with time."""

CHAT_CALLS, CHAT_FILES, CHAT_CHANGES = 483, 47, 248
"""A chat of four streamed tokens: calls of functions of ours, the files that they are in, and how
often one is in another file than the one before. It is 465, 45 and 241 alone."""


@pytest_asyncio.fixture
async def app(smollm2: str) -> AsyncIterator[Any]:
    """The router's app, in front of engines that answer at once."""
    async with routing(smollm2) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    wanted: bool = request.param
    return wanted


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector_off")
async def test_a_request_stays_below_its_ceiling(app: Any, stream: bool) -> None:
    path = await shortest(app, {**COMPLETION, "stream": stream})
    assert path.calls <= OWN_CEILINGS[stream], str(path)
    assert path.total <= CEILINGS[stream], str(path)


@pytest.mark.usefixtures("collector_off")
async def test_a_token_of_a_stream_stays_below_its_ceiling(smollm2: str) -> None:
    question = {**COMPLETION, "stream": True}
    async with routing(smollm2, STEP_MS) as app:
        short = await shortest(app, question, 5)
        long = await shortest(app, {**question, "max_tokens": TOKENS}, 5)
    assert (long.total - short.total) / (TOKENS - 2) <= TOKEN_CEILING


@pytest.mark.usefixtures("collector_off")
async def test_the_path_of_a_chat_stays_below_its_ceilings(smollm2: str) -> None:
    async with routing(smollm2, STEP_MS) as app:
        path = await shortest(app, CHAT)
    assert path.calls <= CHAT_CALLS, str(path)
    assert len(path.files) <= CHAT_FILES, str(path)
    assert path.changes <= CHAT_CHANGES, str(path)


@pytest.mark.usefixtures("collector_off")
async def test_a_request_leaves_nothing_to_the_garbage_collector(app: Any, stream: bool) -> None:
    question = {**COMPLETION, "stream": stream}
    await ask(app, question)
    gc.collect()
    for _ in range(REQUESTS):
        await ask(app, question)
    await asyncio.sleep(0)
    assert gc.collect() < REQUESTS
