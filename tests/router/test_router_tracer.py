"""What a router follows, what it tells engines of it, and what it sends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from engine_kit.core import core_request
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from router_kit.request_world import World, prefilled

from diptych_frontend.observability.request_tracer import SpanSender
from diptych_protocol import (
    InvalidRequestError,
    RequestJourneyEvent,
    RouterConfig,
)
from diptych_protocol import RequestJourneyEventType as Station
from diptych_router.program.program import start_router_tracer
from diptych_router.telling.router_tracer import RouterTracer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE_PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Traced:
    """A tracer, and the spans that it has sent at its end."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.world = World("p", "d")
        self.world.delivered["r"] = []
        self.tracer = RouterTracer(SpanSender(self._exporter), model_name="m", instance="router-0")

    def begin(self, **fields: Any) -> None:
        request = core_request("r", [1, 2, 3], arrival_time=time.time())
        for name, value in fields.items():
            setattr(request, name, value)
        trace = self.tracer.begin(request, time.monotonic())
        self.world.carry_out(self.world.table.submit(request, 100, time.monotonic(), None, trace))

    def given(self, engine: str) -> Mapping[str, str] | None:
        """The headers of the request as an engine has it."""
        [request] = self.world.fleet.engines[engine].open.values()
        return request.trace_headers

    def spans(self) -> dict[str, ReadableSpan]:
        self.world.table.shut_down(time.monotonic())
        for record in self.world.table.records.take_traced():
            self.tracer.send(record)
        self.tracer.close()
        return {span.name: span for span in self._exporter.get_finished_spans()}


def identity(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}-{context.span_id:016x}"


def test_an_engine_is_told_the_span_that_its_own_belong_to() -> None:
    traced = Traced()
    traced.begin(trace_headers={"traceparent": TRACE_PARENT, "tracestate": "a=1"})
    told = [traced.given("p")]
    prefilled(traced.world)
    told.append(traced.given("d"))
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
    assert (traced.given("p") != headers) == is_traced
    assert bool(traced.spans()) == is_traced


def test_an_engine_speaks_for_itself_alone() -> None:
    traced = Traced()
    traced.begin()
    records, now = traced.world.table.records, time.monotonic()
    records.told("d", [RequestJourneyEvent("r/1", Station.QUEUED, 1.0)], now)
    records.told("p", [RequestJourneyEvent("other/1", Station.QUEUED, 1.0)], now)
    assert "engine prefill" not in traced.spans()


def test_what_is_under_way_when_the_router_ends_is_sent_as_failed() -> None:
    traced = Traced()
    traced.begin()
    spans = traced.spans()
    for name in ("request", "prefill"):
        assert spans[name].status.status_code is StatusCode.ERROR
        assert spans[name].status.description == "the router was shut down"
        assert (spans[name].attributes or {})["error.type"] == "shutdown"
        assert spans[name].resource.attributes["service.instance.id"] == "router-0"
    assert spans["queue"].status.status_code is StatusCode.UNSET


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
