"""Spans of a router and its engines make one trace: real engines, and a real OTLP endpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from engine_kit.executor import PACED
from free_ports import free_port
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from service_kit import (
    LIGHT,
    Core,
    Streaming,
    all_usable,
    cores,
    engine_config,
    link_of,
    routing,
)
from span_collector import Received, span_collector
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_protocol import RouterConfig
from diptych_router.requests.pool_client import PoolClient

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "The lighthouse keeper climbed the stairs every evening, and "
BODY = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 8}
WAY = [
    ("request", "queue", "diptych-router"),
    ("request", "prefill", "diptych-router"),
    ("prefill", "engine prefill", "prefill-0"),
    ("request", "hand-off", "diptych-router"),
    ("hand-off", "engine hand-off", "decode-0"),
    ("request", "decode", "diptych-router"),
    ("decode", "engine decode", "decode-0"),
]
"""Parent, span and whose it is, of a request that nobody disturbs."""


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, list[Received]]]:
    with span_collector() as found:
        yield found


@pytest.fixture
def received(collector: tuple[str, list[Received]]) -> list[Received]:
    collector[1].clear()
    return collector[1]


@pytest.fixture(scope="module")
def engines(keys_dir: Path, collector: tuple[str, list[Received]]) -> Iterator[list[Core]]:
    configs = [
        engine_config(name, LIGHT, otlp_traces_endpoint=collector[0], executor_class=PACED)
        for name in ("prefill-0", "decode-0", "decode-1")
    ]
    with cores(keys_dir, *configs) as started:
        yield started


@asynccontextmanager
async def traced(
    model: str, keys_dir: Path, url: str, engines: list[Core], **settings: Any
) -> AsyncIterator[tuple[PoolClient, httpx.AsyncClient]]:
    """A router of one prefill engine and some for decode. Its spans have arrived at the end."""
    prefill, *decode = [engine.address for engine in engines]
    async with routing(
        model, keys_dir, [prefill], decode, otlp_traces_endpoint=url, **settings
    ) as client:
        await all_usable(client, len(engines))
        app = httpx.ASGITransport(build_app(client))
        async with httpx.AsyncClient(transport=app, base_url="http://test") as http:
            yield client, http


def way_of(spans: list[Received]) -> list[tuple[str, str, str]]:
    """The children in the order of their beginnings: parent, span, and whose it is."""
    names = {span.span_id: span.name for span in spans}
    return [
        (
            names[span.parent_id],
            span.name,
            span.resource["service.instance.id"]
            if span.name.startswith("engine")
            else span.resource["service.name"],
        )
        for span in in_order(spans)
        if span.parent_id in names
    ]


def in_order(spans: list[Received]) -> list[Received]:
    """By beginning; what begins with its parent comes after it."""
    ids = {span.span_id: span for span in spans}

    def depth(span: Received) -> int:
        return 1 + depth(ids[span.parent_id]) if span.parent_id in ids else 0

    return sorted(spans, key=lambda span: (span.began, depth(span)))


def named(spans: list[Received], name: str) -> Received:
    [found] = [span for span in spans if span.name == name]
    return found


def check_nesting(spans: list[Received]) -> None:
    """It is one trace, no span outlives its parent, and siblings of one attempt do not overlap."""
    assert len({span.trace_id for span in spans}) == 1
    ids = {span.span_id: span for span in spans}
    assert len(ids) == len(spans)
    ends: dict[str, int] = {}
    for span in in_order(spans):
        assert span.began <= span.ended
        if span.parent_id in ids:
            parent = ids[span.parent_id]
            assert parent.began <= span.began <= span.ended <= parent.ended, span.name
            assert ends.get(span.parent_id, 0) <= span.began, span.name
            ends[span.parent_id] = span.ended


async def test_a_request_is_one_trace_below_its_callers(
    smollm2: str,
    keys_dir: Path,
    collector: tuple[str, list[Received]],
    engines: list[Core],
    received: list[Received],
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
    async with traced(smollm2, keys_dir, collector[0], engines[:2]) as (client, http):
        assert await client.is_tracing_enabled()
        body = {**BODY, "prompt": f"Nobody has asked this before. {PROMPT}"}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
    check_nesting(received)
    assert way_of(received) == WAY
    root = named(received, "request")
    assert (root.trace_id, root.parent_id) == (TRACE_ID, PARENT_ID)
    usage = answer.json()["usage"]
    told = root.attributes
    assert told["gen_ai.request.id"] == "mine"
    assert told["gen_ai.request.model"] == "smollm2"
    assert told["gen_ai.request.max_tokens"] == 8
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["diptych.attempts"] == 1
    queue = named(received, "queue").attributes
    assert (queue["diptych.prefill_engine"], queue["diptych.decode_engine"]) == (
        "prefill-0",
        "decode-0",
    )
    assert queue["diptych.reason"] == answer.headers["x-diptych-reason"]
    parts = [named(received, name).attributes for name in ("prefill", "hand-off", "decode")]
    assert [part["diptych.tokens"] for part in parts] == [1, 1, 6]
    usage_of = [x.name for x in received if "gen_ai.usage.output_tokens" in x.attributes]
    assert usage_of == ["request"], "backends add them up"
    stations = [event.name for event in named(received, "engine hand-off").span.events]
    assert "KV_DONE" in stations, "its blocks came"
    assert all(span.span.status.code == Status.STATUS_CODE_UNSET for span in received)


async def test_a_stream_without_a_callers_trace_begins_one(
    smollm2: str,
    keys_dir: Path,
    collector: tuple[str, list[Received]],
    engines: list[Core],
    received: list[Received],
) -> None:
    async with traced(smollm2, keys_dir, collector[0], engines[:2]) as (_, http):
        answer = await http.post("/v1/completions", json={**BODY, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
    check_nesting(received)
    assert way_of(received) == WAY
    assert named(received, "request").parent_id == ""


async def test_a_caller_who_samples_nothing_gets_nothing(
    smollm2: str,
    keys_dir: Path,
    collector: tuple[str, list[Received]],
    engines: list[Core],
    received: list[Received],
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    async with traced(smollm2, keys_dir, collector[0], engines[:2]) as (_, http):
        answer = await http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200
    assert received == []


async def test_how_a_request_ended_is_told(
    smollm2: str,
    keys_dir: Path,
    collector: tuple[str, list[Received]],
    engines: list[Core],
    received: list[Received],
    eventually: Any,
) -> None:
    """By a stop string, by a client who left, or because no engine could take it."""
    async with traced(smollm2, keys_dir, collector[0], engines[:2]) as (client, http):
        whole = await http.post("/v1/completions", json={**BODY, "max_tokens": 16})
        stop = whole.json()["choices"][0]["text"][4:8]
        await http.post("/v1/completions", json={**BODY, "max_tokens": 16, "stop": [stop]})
        stream = Streaming(client, PROMPT)
        await eventually(lambda: stream.token_ids)
        await stream.leave()
    reasons = [
        span.attributes["gen_ai.response.finish_reasons"]
        for span in in_order(received)
        if span.name == "request"
    ]
    assert reasons == [["length"], ["stop"], ["abort"]]


async def test_a_request_that_is_refused_has_a_trace_that_says_so(
    smollm2: str,
    keys_dir: Path,
    collector: tuple[str, list[Received]],
    received: list[Received],
) -> None:
    nowhere = [f"127.0.0.1:{free_port()}"]
    async with routing(
        smollm2, keys_dir, nowhere, nowhere, otlp_traces_endpoint=collector[0], max_held=0
    ) as client:
        app = httpx.ASGITransport(build_app(client))
        async with httpx.AsyncClient(transport=app, base_url="http://test") as http:
            answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503
    check_nesting(received)
    assert way_of(received) == [("request", "queue", "diptych-router")]
    for span in received:
        assert span.span.status.code == Status.STATUS_CODE_ERROR
        assert span.attributes["error.type"] == "EngineOverloadedError"
    assert named(received, "request").span.status.message


async def test_an_attempt_that_failed_and_the_next_one_are_one_trace(
    smollm2: str,
    keys_dir: Path,
    collector: tuple[str, list[Received]],
    engines: list[Core],
    received: list[Received],
    eventually: Any,
) -> None:
    """The decode engine is killed in the middle of a stream."""
    _, lost, twin = engines
    async with traced(smollm2, keys_dir, collector[0], engines) as (client, _):
        link_of(client, twin).row["open_tokens"] += 1_000_000
        stream = Streaming(client, PROMPT, 100)
        await eventually(lambda: len(stream.token_ids) > 5)
        lost.signal(signal.SIGKILL)
        assert len(await stream.done()) == 100
    lost.kill()
    lost.start()
    check_nesting(received)
    again = [
        ("attempt" if parent == "request" else parent, name, owner.replace("0", "1", 1))
        if owner == "decode-0" or parent == "request"
        else (parent, name, owner)
        for parent, name, owner in WAY
    ]
    assert way_of(received) == [*WAY, ("request", "attempt", "diptych-router"), *again]
    root, attempt = named(received, "request"), named(received, "attempt")
    assert root.span.status.code == Status.STATUS_CODE_UNSET, "the client noticed nothing"
    assert root.attributes["gen_ai.usage.output_tokens"] == 100
    assert root.attributes["diptych.attempts"] == 2
    failed = [span for span in received if span.span.status.code == Status.STATUS_CODE_ERROR]
    assert [(span.name, span.parent_id) for span in failed] == [("decode", root.span_id)]
    assert failed[0].attributes["error.type"] == "loss"
    assert attempt.attributes["diptych.attempt"] == 2
    assert attempt.attributes["diptych.retry_reason"] == failed[0].span.status.message


async def test_a_router_that_is_told_to_end_sends_its_last_spans(
    smollm2: str,
    keys_dir: Path,
    tmp_path: Path,
    collector: tuple[str, list[Received]],
    engines: list[Core],
    received: list[Received],
    eventually: Any,
) -> None:
    config = RouterConfig(smollm2, served_name="smollm2", otlp_traces_endpoint=collector[0])
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(config))
    port = free_port()
    router = subprocess.Popen(
        [
            *(sys.executable, "-m", "diptych_router", "--config", tmp_path / "router.json"),
            *("--port", str(port), "--keys", keys_dir),
            *("--prefill", engines[0].address, "--decode", engines[1].address),
        ]
    )
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S
        ) as http:
            await eventually(lambda: is_ready(port))
            answer = await http.post("/v1/completions", json=BODY)
            assert answer.status_code == 200
        router.send_signal(signal.SIGTERM)
        assert router.wait(PATIENCE_S) == 0
    finally:
        router.kill()
        router.wait()
    assert way_of(received) == WAY


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False
