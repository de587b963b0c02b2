"""Servers with a batch directory around an engine that echoes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_kit.echo_engine import EchoEngine

from diptych_frontend.app import build_app
from diptych_frontend.batches_api import batch_run
from diptych_frontend.batches_api.batch_run import Manners
from diptych_frontend.batches_api.service import BatchService
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_protocol.config import Batches

CLIENTS = ("ann", "bob")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens every few seconds happens more often."""
    monkeypatch.setattr(batch_run, "TICK_S", 0.02)
    monkeypatch.setattr(batch_run, "LOOK_S", 0.02)
    monkeypatch.setattr(batch_run, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(batch_run, "MAX_WAIT_S", 0.02)
    monkeypatch.setattr("diptych_frontend.batches_api.service.LOOK_S", 0.05)
    monkeypatch.setattr("diptych_frontend.batches_api.service.REST_S", 0.05)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory with the API key of each client, which is its name."""
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in CLIENTS:
        (folder / name).write_text(f"key-of-{name}")
    return folder


class Server:
    """One process of a router, as far as batches go."""

    def __init__(self, url: str, service: BatchService, metrics: ServerMetrics) -> None:
        self.url = url
        self.service = service
        self.metrics = metrics

    def client(self, name: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=f"key-of-{name}", max_retries=0
        )

    def metric(self, name: str, **labels: str) -> float:
        labels = {"model_name": "echo", **labels}
        return self.metrics.registry.get_sample_value(f"diptych:{name}", labels) or 0.0


@pytest.fixture
def start(tmp_path: Path, keys: Path, serve: Any) -> Callable[..., Any]:
    """`start(engine)`: an async context that yields a `Server`; all share one directory."""

    @contextlib.asynccontextmanager
    async def starting(
        engine: EchoEngine, manners: Manners | None = None, **settings: Any
    ) -> AsyncIterator[Server]:
        metrics = ServerMetrics(engine.model_name)
        names = ApiKeys(keys)
        manners = manners or Manners(is_client=lambda name: name in names.names)
        service = BatchService(tmp_path / "batches", Batches(**settings), metrics, manners)
        app = build_app(engine, metrics=metrics, api_keys=names, batches=service)
        async with serve(app, drain_timeout_s=2.0) as url:
            try:
                yield Server(url, service, metrics)
            finally:
                await service.close()

    return starting


def lines(*bodies: dict[str, Any], url: str = "/v1/completions") -> bytes:
    """An input file; the custom ids are `line-0`, `line-1`, ..."""
    requests = [
        {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(request) + "\n" for request in requests).encode()


@pytest.fixture
def written() -> Callable[..., bytes]:
    return lines
