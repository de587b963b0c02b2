"""The OpenTelemetry spans of the requests of a router, and of its engines' part in them.

    request ─┬─ queue
             ├─ prefill  ── engine prefill
             ├─ hand-off ── engine hand-off
             ├─ decode   ── engine decode
             └─ attempt ─┬─ queue ...          (after a failure)

Spans are made of a request's record when it has ended. Importing this needs the extra `tracing`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from diptych_frontend.observability.request_tracer import SpanSender
from diptych_protocol import EngineCoreRequest
from diptych_protocol.wire import time_of_day
from diptych_router.requests.request_record import RequestRecord
from diptych_router.telling.request_spans import SpanFacts, Value, request_attributes, spans_of

MAX_ENGINES = 1024
"""The number of engines whose resources are cached."""
EPOCH_NS = int(time_of_day(0.0) * 1e9)
"""The time of day at which the router's clock showed 0."""
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The trace of one request. The ids of its spans are derived from their keys, because an engine
    is told its parent before that span has ended."""

    trace_id: int
    request_id: str
    """Distinguishes it from other requests of the trace."""
    client: SpanContext | None
    """The client's span, if it named one."""
    state: TraceState
    arrived_s: float
    """When the API received it, by the router's clock."""
    attributes: dict[str, Value]

    def span_context(self, key: str) -> SpanContext:
        return SpanContext(self.trace_id, self._span_id(key), False, SAMPLED, self.state)

    def headers(self, core_id: str) -> dict[str, str]:
        parent = f"00-{self.trace_id:032x}-{self._span_id(core_id):016x}-01"
        state = self.state.to_header()
        return {"traceparent": parent, **({"tracestate": state} if state else {})}

    def _span_id(self, key: str) -> int:
        named = f"{self.trace_id:032x} {self.request_id} {key}".encode()
        return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")


class RouterTracer:
    """Makes spans from the records of one router's requests. Another thread exports them."""

    def __init__(self, sender: SpanSender, *, model_name: str, instance: str) -> None:
        """`instance`: the router's own name."""
        # It makes no spans: their ids are told to engines before there are spans.
        provider = TracerProvider(shutdown_on_exit=False)
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._propagator = TraceContextTextMapPropagator()
        self._sender = sender
        self._model_name = model_name
        self._own = _resource("diptych-router", instance)
        self._engine = lru_cache(MAX_ENGINES)(lambda name: _resource("diptych", name))

    def begin(self, request: EngineCoreRequest, now_s: float) -> RequestTrace | None:
        context = self._propagator.extract(carrier=request.trace_headers or {}, context=Context())
        client: SpanContext | None = get_current_span(context).get_span_context()
        if client is not None and not client.is_valid:
            client = None
        trace_id = self._ids.generate_trace_id() if client is None else client.trace_id
        sampled = self._sampler.should_sample(context, trace_id, "request", SpanKind.SERVER)
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        waited_s = min(max(0.0, time_of_day(now_s) - request.arrival_time), now_s)
        return RequestTrace(
            trace_id,
            request.request_id,
            client,
            sampled.trace_state or TraceState(),
            now_s - waited_s,
            request_attributes(request, self._model_name),
        )

    def send(self, record: RequestRecord) -> None:
        trace, record.trace = record.trace, None
        if isinstance(trace, RequestTrace):
            for facts in spans_of(record, trace.arrived_s, trace.attributes):
                self._sender.send(self._span(trace, facts))

    def close(self) -> None:
        self._sender.close()

    def _span(self, trace: RequestTrace, facts: SpanFacts) -> ReadableSpan:
        parent = facts.parent
        return ReadableSpan(
            facts.name,
            trace.span_context(facts.key),
            trace.client if parent is None else trace.span_context(parent),
            self._engine(facts.engine) if facts.engine else self._own,
            facts.attributes,
            [Event(name, timestamp=_to_ns(time_s)) for name, time_s in facts.events],
            kind=SpanKind[facts.kind.upper()],
            status=Status(StatusCode.ERROR, facts.error) if facts.error else Status(),
            start_time=_to_ns(facts.began_s),
            end_time=_to_ns(facts.ended_s),
        )


def _to_ns(time_s: float) -> int:
    """Nanoseconds since 1970 at a time of the router's clock."""
    return EPOCH_NS + int(time_s * 1e9)


def _resource(service: str, instance: str) -> Resource:
    return Resource.create({"service.name": service, "service.instance.id": instance})
