"""What a router follows, what it tells engines of it, and what it sends."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from engine_kit.core import core_request
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from diptych_frontend.observability.span_sender import SpanSender
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    InvalidRequestError,
    RequestJourneyEvent,
    RouterConfig,
)
from diptych_protocol import RequestJourneyEventType as Station
from diptych_router.actions import Add, Explain
from diptych_router.policy import Decision
from diptych_router.router_tracer import RouterTracer
from diptych_router.tracing import start_router_tracer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE_PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
FACTS = {"prefill": "p", "decode": "d", "reason": "least loaded", "attempts": 1}


class Traced:
    """A tracer, and the spans that it has sent at its end."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = RouterTracer(SpanSender(self._exporter), model_name="m", instance="router-0")

    def begin(self, **fields: Any) -> None:
        request = core_request("r", [1, 2, 3], arrival_time=time.time())
        for name, value in fields.items():
            setattr(request, name, value)
        self.tracer.begin(request)

    def send(self, core_id: str, engine: str) -> EngineCoreRequest:
        """The request as it goes to an engine."""
        request = core_request(core_id, [1, 2, 3], trace_headers={"traceparent": TRACE_PARENT})
        self.tracer.note(Add(engine, request), lambda key: key)
        return request

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracer.close()
        return {span.name: span for span in self._exporter.get_finished_spans()}


def identity(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}-{context.span_id:016x}"


def test_an_engine_is_told_the_span_that_its_own_belong_to() -> None:
    traced = Traced()
    traced.begin(trace_headers={"traceparent": TRACE_PARENT, "tracestate": "a=1"})
    traced.tracer.note(Explain("r", FACTS, Decision("p", "d", "least loaded")), str)
    told = [traced.send("r/1", "p").trace_headers]
    traced.tracer.delivered([EngineCoreOutput("r", [5])], [])
    told.append(traced.send("r/2", "d").trace_headers)
    spans = traced.spans()
    assert told == [
        {"traceparent": f"00-{identity(spans[name])}-01", "tracestate": "a=1"}
        for name in ("prefill", "hand-off")
    ]
    root = spans["request"]
    assert identity(root).startswith(TRACE_ID)
    assert root.parent is not None
    assert root.parent.span_id == int(PARENT_ID, 16)


@pytest.mark.parametrize("parent", [None, f"00-{'0' * 32}-{PARENT_ID}-01"])
def test_without_a_sound_context_a_trace_begins(parent: str | None) -> None:
    traced = Traced()
    traced.begin(trace_headers=parent and {"traceparent": parent})
    root = traced.spans()["request"]
    assert root.parent is None
    assert not identity(root).startswith("0" * 32)


@pytest.mark.parametrize(
    ("sampler", "headers", "is_traced"),
    [
        ("parentbased_always_on", None, True),
        ("parentbased_always_off", None, False),
        ("parentbased_always_off", {"traceparent": TRACE_PARENT}, True),
        ("parentbased_always_on", {"traceparent": TRACE_PARENT[:-1] + "0"}, False),
    ],
)
def test_samplers_are_respected(
    monkeypatch: pytest.MonkeyPatch, sampler: str, headers: dict[str, str] | None, is_traced: bool
) -> None:
    """The one of the environment, for requests whose callers have not decided."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    traced = Traced()
    traced.begin(trace_headers=headers)
    sent = traced.send("r/1", "p")
    assert (sent.trace_headers != {"traceparent": TRACE_PARENT}) == is_traced
    assert bool(traced.spans()) == is_traced


def test_an_engine_speaks_for_itself_alone() -> None:
    traced = Traced()
    traced.begin()
    traced.tracer.note(Explain("r", FACTS, Decision("p", "d", "least loaded")), str)
    traced.send("r/1", "p")
    traced.tracer.take_stations("d", [RequestJourneyEvent("r/1", Station.QUEUED, 1.0)])
    traced.tracer.take_stations("p", [RequestJourneyEvent("other/1", Station.QUEUED, 1.0)])
    assert "engine prefill" not in traced.spans()


def test_what_is_under_way_when_the_router_ends_is_sent_as_failed() -> None:
    traced = Traced()
    traced.begin()
    for span in traced.spans().values():
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "the router was shut down"
        assert span.resource.attributes["service.instance.id"] == "router-0"


def test_nothing_of_it_is_imported_without_an_endpoint() -> None:
    assert start_router_tracer(RouterConfig("m")) is None
    code = (
        "import sys, diptych_router.__main__; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(InvalidRequestError, match="otlp_traces_endpoint"):
        RouterConfig("m", otlp_traces_endpoint="collector:4318").check()
