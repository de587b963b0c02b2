"""What those who have no key may ask, and what it costs the engines: nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_kit.fake_core import FakeCore
from engine_kit.mq import endpoint, fake_client
from free_ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from service_kit import make_router

from diptych_frontend.app import build_app
from diptych_frontend.core_client.member import PULSE_INTERVAL_S
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.probes import METRICS_AGE_S, build_probe_app
from diptych_protocol import SchedulerStats
from diptych_router.engines.engine_link import STATS_INTERVAL_S

ROUNDS = 250
OPEN_PATHS = ("/metrics", "/health", "/live", "/ping")


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeCore]:
    core = FakeCore(endpoint(tmp_path))
    yield core
    await core.close()


def asking(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pod")


async def scrape(app: Any) -> float:
    """Ask all open paths again and again; returns how many seconds that took."""
    begun = time.monotonic()
    async with asking(app) as http:
        for _ in range(ROUNDS):
            answers = await asyncio.gather(*(http.get(path) for path in OPEN_PATHS))
            assert {answer.status_code for answer in answers} <= {200, 503}
    return time.monotonic() - begun


async def value(app: Any, name: str) -> float:
    async with asking(app) as http:
        text = (await http.get("/metrics")).text
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return next((sample.value for sample in samples if sample.name == f"diptych:{name}"), 0.0)


async def test_a_thousand_scrapes_of_an_engine_ask_its_core_nothing(
    tmp_path: Path, engine: FakeCore, eventually: Any
) -> None:
    client = fake_client(tmp_path, heartbeat_ms=3_600_000)
    await client.setup()
    app = build_probe_app(client, ServerMetrics("m", client.stats_by_engine))
    try:
        before = len(engine.heard)
        seconds = await scrape(app)
        assert len(engine.heard) - before <= 1 + seconds / PULSE_INTERVAL_S
        engine.answers["stats"] = SchedulerStats(num_running=7)

        async def is_seen() -> bool:
            return await value(app, "num_requests_running") == 7

        await eventually(is_seen)
    finally:
        client.close()


async def test_a_thousand_scrapes_of_a_router_ask_no_engine(smollm2: str, eventually: Any) -> None:
    address = f"127.0.0.1:{free_port()}"
    engine = FakeCore(f"tcp://{address}")
    client = make_router(smollm2, address, "127.0.0.1:1", None)
    app = build_app(client, metrics=ServerMetrics("m", client.stats_by_engine))
    client.start()
    try:
        await eventually(lambda: len(client.pools.of("prefill")) == 1)
        before = len(engine.heard)
        seconds = await scrape(app)
        assert len(engine.heard) - before <= 1 + seconds / STATS_INTERVAL_S
        engine.answers["stats"] = SchedulerStats(num_running=7)

        async def is_seen() -> bool:
            return await value(app, "num_requests_running") == 7

        await eventually(is_seen)
    finally:
        client.shutdown()
        await engine.close()


async def test_metrics_are_written_once_a_second_however_often_they_are_asked_for(
    tmp_path: Path, engine: FakeCore
) -> None:
    client = fake_client(tmp_path)
    await client.setup()
    written = 0

    def count() -> dict[str, SchedulerStats]:
        nonlocal written
        written += 1
        return {}

    try:
        app = build_probe_app(client, ServerMetrics("m", count))
        assert await scrape(app) / METRICS_AGE_S + 1 >= written > 0
        written = 0
        begun = time.monotonic()
        async with asking(app) as http:
            for number in range(100):
                accept = f"application/openmetrics-text; version=1.0.{number}"
                answer = await http.get("/metrics", headers={"accept": accept})
                assert answer.headers["content-type"].startswith("application/openmetrics-text")
                assert "# TYPE diptych:" in answer.text, "as alerts and dashboards ask for them"
        assert written <= 1 + (time.monotonic() - begun) / METRICS_AGE_S
    finally:
        client.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings"),
        ("POST", "/v1/kv_transfer/reject"), ("GET", "/v1/models"), ("GET", "/v1/models/m"),
        ("GET", "/admin/state"),
    ],
)  # fmt: skip
async def test_the_probe_port_of_an_engine_takes_no_request(
    tmp_path: Path, engine: FakeCore, method: str, path: str
) -> None:
    client = fake_client(tmp_path)
    await client.setup()
    try:
        async with asking(build_probe_app(client, ServerMetrics("m"))) as http:
            body = {"model": "m", "prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}
            answer = await http.request(method, path, json=body)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
            assert (await http.get("/version")).status_code == 200
        asked = {getattr(what, "method", "a request") for _, _, what in engine.heard}
        assert asked <= {"describe", "stats"}, "the greeting, and its own pulse"
    finally:
        client.close()
