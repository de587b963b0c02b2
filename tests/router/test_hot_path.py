"""What a request costs the router, counted: calls of functions, from its bytes to its answer.

Counts are nearly the same on every machine, unlike times, so they can have ceilings. Only how often
the event loop wakes up for the engines' messages is up to the machine, so the request that cost the
least is the one that is compared. CONTRIBUTING.md says how to raise a ceiling.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

import pytest
import pytest_asyncio
from benchmarks.scenarios.router import engines
from free_ports import free_port
from waits import PATIENCE_S

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.openai import build_app
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import RouterConfig
from diptych_router.discovery import parse_targets
from diptych_router.policy import Role
from diptych_router.pool_client import PoolClient

REQUESTS = 20
CEILINGS = {False: 1430, True: 1515}
"""Whether the answer is streamed -> calls of Python and built-in functions for a request."""


@pytest_asyncio.fixture
async def app(smollm2: str) -> AsyncIterator[Any]:
    """The router's app, in front of engines that answer at once."""
    source = resolve_model(smollm2, weights=False)
    renderer = TextRenderer(source)
    limit = source.config.max_position_embeddings
    inputs = InputProcessor(renderer, max_model_len=limit, vocab_size=source.config.vocab_size)
    ports: dict[Role, int] = {"prefill": free_port(), "decode": free_port()}
    with engines("benchmarks.instant_core", list(ports.values())):
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


async def ask(app: Any, *, stream: bool) -> None:
    """One completion of two tokens."""
    question = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 2, "stream": stream}
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
    counts: list[int] = []

    def saw(frame: FrameType, event: str, argument: object) -> None:
        counts[-1] += event in ("call", "c_call")

    for _ in range(REQUESTS):
        counts.append(0)
        sys.setprofile(saw)
        try:
            await ask(app, stream=stream)
        finally:
            sys.setprofile(None)
    assert min(counts) <= CEILINGS[stream], counts


@pytest.mark.usefixtures("collector_off")
async def test_a_request_leaves_nothing_to_the_garbage_collector(app: Any, stream: bool) -> None:
    await ask(app, stream=stream)
    gc.collect()
    for _ in range(REQUESTS):
        await ask(app, stream=stream)
    await asyncio.sleep(0)
    assert gc.collect() < REQUESTS
