"""Spans of requests: rows B12 and C9."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from engine_kit.core import DUMMY, core_request, make_core, run
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from span_collector import span_collector

from diptych_engine import LLMEngine
from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.observability.request_tracer import RequestTracer, SpanSender
from diptych_frontend.observability.tracing import start_tracer, trace_context
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    InvalidRequestError,
    RequestJourneyEvent,
    SamplingParams,
)
from diptych_protocol import RequestJourneyEventType as Station

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE_PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
CONFIG: dict[str, Any] = {"model": DUMMY, "num_blocks": 64, "num_threads": 1}


async def test_contract_B12_a_callers_trace_goes_through_front_end_and_core() -> None:
    with span_collector() as (endpoint, spans):
        engine = await AsyncLLM.start(EngineConfig(**CONFIG, otlp_traces_endpoint=endpoint))
        try:
            assert await engine.is_tracing_enabled()
            app = httpx.ASGITransport(build_app(engine))
            async with httpx.AsyncClient(transport=app, base_url="http://test") as client:
                body = {"model": engine.model_name, "prompt": [1, 2, 3], "max_tokens": 4}
                headers = {"traceparent": TRACE_PARENT, "x-request-id": "mine"}
                began = time.time_ns()
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
                untraced = await client.post("/v1/completions", json=body)
                assert untraced.status_code == 200
        finally:
            await asyncio.to_thread(engine.shutdown)
    span, other = spans
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert other.trace_id != TRACE_ID
    assert began < span.began < span.ended
    found = span.attributes
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.usage.input_tokens"] == 3
    assert found["gen_ai.usage.output_tokens"] == 4
    parts = [
        found[f"gen_ai.latency.{part}"]
        for part in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    ]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) <= found["gen_ai.latency.e2e"]


@pytest.mark.parametrize("multiprocess_mode", [False, True])
def test_contract_A05_an_llm_engine_sends_spans_too(multiprocess_mode: bool) -> None:
    with span_collector() as (endpoint, spans):
        config = EngineConfig(**CONFIG, otlp_traces_endpoint=endpoint)
        engine = LLMEngine(config, multiprocess_mode=multiprocess_mode)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        headers = {"traceparent": TRACE_PARENT}
        engine.add_request("mine", [1, 2, 3], params, trace_headers=headers)
        while engine.has_unfinished_requests():
            engine.step()
        engine.shutdown()
    [span] = spans
    found = span.attributes
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.latency.time_in_model_decode"] > 0


async def test_contract_C09_tracing_is_enabled_exactly_with_an_endpoint() -> None:
    """Nothing of it is imported without one."""
    engine = AsyncLLM(EngineConfig(**CONFIG))
    try:
        assert not await engine.is_tracing_enabled()
    finally:
        engine.shutdown()
    code = (
        "import sys; from diptych_frontend.core_client.async_llm import AsyncLLM; "
        "from diptych_frontend.app import build_app; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_contract_C09_a_missing_package_is_an_error_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, SpanSender.__module__)
    config = EngineConfig(**CONFIG, otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")
    with pytest.raises(InvalidRequestError, match=r"install .*opentelemetry") as refused:
        start_tracer(config)
    assert refused.value.param == "otlp_traces_endpoint"


def test_contract_C09_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(InvalidRequestError, match="otlp_traces_endpoint"):
        EngineConfig(**CONFIG, otlp_traces_endpoint="collector:4318").check()


@pytest.mark.parametrize(
    ("headers", "passed_on"),
    [
        ({}, None),
        ({"traceparent": "nonsense"}, None),
        ({"traceparent": TRACE_PARENT + "\n"}, None),
        ({"traceparent": TRACE_PARENT}, {"traceparent": TRACE_PARENT}),
        ({"tracestate": "a=1"}, None),
        (
            {"traceparent": TRACE_PARENT, "tracestate": "a=1", "cookie": "secret"},
            {"traceparent": TRACE_PARENT, "tracestate": "a=1"},
        ),
        ({"traceparent": TRACE_PARENT, "tracestate": "a" * 513}, {"traceparent": TRACE_PARENT}),
    ],
)
def test_contract_B12_only_a_sound_context_is_passed_on(
    headers: dict[str, str], passed_on: dict[str, str] | None
) -> None:
    assert trace_context(headers.get("traceparent"), headers.get("tracestate")) == passed_on


def spans_of(*messages: EngineCoreOutputs, stopped: bool = False) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(SpanSender(exporter), model_name="m")
    tracer.begin(core_request("r", [1, 2], arrival_time=time.time()))
    for message in messages:
        if stopped:
            tracer.stopped(["r", "unknown"])
        tracer.take(message)
    tracer.close()
    return list(exporter.get_finished_spans())


def message(*events: RequestJourneyEvent, **output: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput("r", [5], **output)], journey_events=list(events)
    )


def test_contract_B12_a_failed_request_has_a_failed_span() -> None:
    (span,) = spans_of(message(finish_reason=FinishReason.ERROR, error="no luck"))
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "no luck"


def test_contract_B12_what_a_stop_string_ended_was_not_aborted() -> None:
    for stopped, reason in ((True, "stop"), (False, "abort")):
        (span,) = spans_of(message(), message(finish_reason=FinishReason.ABORT), stopped=stopped)
        assert span.attributes is not None
        assert span.attributes["gen_ai.response.finish_reasons"] == (reason,)
        assert span.attributes["gen_ai.usage.output_tokens"] == 2


def test_contract_B12_a_request_that_never_ran_has_no_times() -> None:
    queued = RequestJourneyEvent("r", Station.QUEUED, 1.0)
    (span,) = spans_of(message(queued, finish_reason=FinishReason.ABORT))
    assert span.attributes is not None
    assert not [name for name in span.attributes if name.startswith("gen_ai.latency")]


def test_contract_B12_the_core_returns_the_context_with_the_last_output() -> None:
    core = make_core()
    request = core_request(
        "r", [1, 2, 3], max_tokens=2, trace_headers={"traceparent": TRACE_PARENT}
    )
    *others, last = run(core, request)["r"]
    assert last.trace_headers == {"traceparent": TRACE_PARENT}
    assert all(output.trace_headers is None for output in others)


def test_contract_B12_a_dead_collector_holds_nobody_up() -> None:
    tracer = start_tracer(EngineConfig(**CONFIG, otlp_traces_endpoint="http://127.0.0.1:1/traces"))
    assert tracer is not None
    tracer.begin(core_request("r", [1, 2]))
    tracer.take(message(finish_reason=FinishReason.STOP))
    tracer.close()
