"""The real model's tokenizer, loaded once for all front-end tests; servers around an engine that
echoes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from engine_kit.echo_engine import EchoEngine
from served import serving
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.text.renderer import TextRenderer
from diptych_frontend.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_source(smollm2: str) -> ModelSource:
    return resolve_model(smollm2)


@pytest.fixture(scope="session")
def text_renderer(model_source: ModelSource) -> TextRenderer:
    return TextRenderer(model_source)


@pytest.fixture(scope="session")
def tokenizer(text_renderer: TextRenderer) -> Tokenizer:
    assert text_renderer.tokenizer is not None
    return text_renderer.tokenizer


@pytest.fixture
async def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="module")
def echo_app() -> Any:
    return build_app(EchoEngine())


@pytest.fixture
def serve() -> Any:
    """`serve(app, **options)`: an async context that yields the base URL."""
    return serving


@pytest.fixture
def app(engine: EchoEngine) -> Any:
    metrics = ServerMetrics(engine.model_name, engine.stats_by_engine)
    return build_app(engine, metrics=metrics, max_body_bytes=64 << 10)


@pytest.fixture
async def http(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client straight into the app: quick, for all that needs no socket."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def strict_http(engine: EchoEngine) -> AsyncIterator[httpx.AsyncClient]:
    """As `http`, where unknown fields are refused."""
    transport = httpx.ASGITransport(build_app(engine, unknown_fields="refuse"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def http_socket(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real server."""
    async with (
        serving(app, drain_timeout_s=2.0) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A server in a thread of its own, so that blocking clients can talk to it."""
    loop = asyncio.new_event_loop()
    started: list[str] = []
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(build_app(EchoEngine())) as url:
            started.append(url)
            ready.set()
            await stop.wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        if not ready.wait(PATIENCE_S):
            raise TimeoutError("the server did not start")
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def model() -> str:
    """The name of the model behind `base_url`."""
    return "echo"
