"""What a request costs the router, counted: calls of functions, from its bytes to its answer.

Counts are nearly the same on every machine, unlike times, so they can have ceilings. Only how often
the event loop wakes up for the engines' messages is up to the machine, so the request that cost the
least is the one that is compared. CONTRIBUTING.md says how to raise a ceiling.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import FrameType
from typing import Any

import pytest
import pytest_asyncio
from benchmarks.scenarios.router import engines
from free_ports import free_port
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import RouterConfig
from diptych_router.engines.discovery import parse_targets
from diptych_router.engines.engine_table import Role
from diptych_router.requests.pool_client import PoolClient

REQUESTS = 20
CEILINGS = {False: 1525, True: 1610}
"""Whether the answer is streamed -> calls of Python and built-in functions for a request."""


TOKENS, STEP_MS, TOKEN_CEILING = 40, 5, 165
"""Tokens of the longer of two streams, the steps of its engine, and the most calls for a token,
with the event loop's part."""


@pytest_asyncio.fixture
async def app(smollm2: str) -> AsyncIterator[Any]:
    """The router's app, in front of engines that answer at once."""
    async with routing(smollm2) as made:
        yield made


@contextlib.asynccontextmanager
async def routing(smollm2: str, step_ms: int | None = None) -> AsyncIterator[Any]:
    """The router's app. With step_ms, its decode engine makes steps of one token."""
    source = resolve_model(smollm2, weights=False)
    renderer = TextRenderer(source)
    limit = source.config.max_position_embeddings
    inputs = InputProcessor(renderer, max_model_len=limit, vocab_size=source.config.vocab_size)
    ports: dict[Role, int] = {"prefill": free_port(), "decode": free_port()}
    with engines("benchmarks.instant_core", list(ports.values()), step_ms):
        client = PoolClient(
            RouterConfig(model=smollm2, served_name="smollm2", verify="off"),
            inputs,
            OutputProcessor(renderer.tokenizer),
            targets={role: parse_targets(f"127.0.0.1:{port}") for role, port in ports.items()},
            read_keys=None,
        )
        client.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while client.why_not_ready():
                    await asyncio.sleep(0.01)
            yield build_app(client)
        finally:
            client.shutdown()


async def ask(app: Any, *, stream: bool, tokens: int = 2) -> None:
    """One completion."""
    question = {
        "model": "smollm2", "prompt": "Once upon a time", "max_tokens": tokens, "stream": stream,
    }  # fmt: skip
    body = json.dumps(question).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"accept", b"*/*")],
    }  # fmt: skip
    coming = [{"type": "http.request", "body": body, "more_body": False}]
    answer = b""

    async def receive() -> dict[str, Any]:
        if not coming:
            await asyncio.Event().wait()
        return coming.pop()

    async def send(message: dict[str, Any]) -> None:
        nonlocal answer
        assert message.get("status", 200) == 200
        answer += message.get("body", b"")

    await app(scope, receive, send)
    assert b'"finish_reason":"length"' in answer


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
    await ask(app, stream=stream)
    counts = [await calls(ask(app, stream=stream)) for _ in range(REQUESTS)]
    assert min(counts) <= CEILINGS[stream], counts


@pytest.mark.usefixtures("collector_off")
async def test_a_token_of_a_stream_stays_below_its_ceiling(smollm2: str) -> None:
    async with routing(smollm2, STEP_MS) as app:
        await ask(app, stream=True)
        short = min([await calls(ask(app, stream=True)) for _ in range(5)])
        long = min([await calls(ask(app, stream=True, tokens=TOKENS)) for _ in range(5)])
    assert (long - short) / (TOKENS - 2) <= TOKEN_CEILING


async def calls(request: Coroutine[Any, Any, None]) -> int:
    """How many calls of Python and built-in functions it takes to answer."""
    count = 0

    def saw(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(saw)
    try:
        await request
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.usefixtures("collector_off")
async def test_a_request_leaves_nothing_to_the_garbage_collector(app: Any, stream: bool) -> None:
    await ask(app, stream=stream)
    gc.collect()
    for _ in range(REQUESTS):
        await ask(app, stream=stream)
    await asyncio.sleep(0)
    assert gc.collect() < REQUESTS
