"""The OpenTelemetry spans of the requests of a router, and of its engines' part in them.

    request ─┬─ queue
             ├─ prefill  ── engine prefill
             ├─ hand-off ── engine hand-off
             ├─ decode   ── engine decode
             └─ attempt ─┬─ queue ...          (after a failure)

While a request is under way, its trail takes down times. Spans are made of it at the end. Importing
this needs the extra `tracing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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

from diptych_frontend.observability.span_sender import SpanSender
from diptych_frontend.observability.steady_clock import steady_time
from diptych_protocol import EngineCoreOutput, EngineCoreRequest, RequestJourneyEvent
from diptych_router.actions import Action, Add, Explain, Fail, Interrupted
from diptych_router.routed_request import Setback
from diptych_router.trail import Placement, Trail
from diptych_router.trail_spans import SpanFacts, spans_of

MAX_ENGINES = 1024
"""Engines whose resources are remembered."""
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
KINDS = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}


@dataclass(slots=True)
class _Followed:
    """A request that is traced."""

    trail: Trail
    trace_id: int
    client: SpanContext | None
    """The client's span, if it named one."""
    trace_state: TraceState
    epoch_ns: int
    """The time of day at which the monotonic clock showed 0."""

    def span_context(self, span_id: int) -> SpanContext:
        return SpanContext(self.trace_id, span_id, False, SAMPLED, self.trace_state)

    def headers(self, span_id: int) -> dict[str, str]:
        """What makes an engine's span a child of this one."""
        parent = f"00-{self.trace_id:032x}-{span_id:016x}-01"
        state = self.trace_state.to_header()
        return {"traceparent": parent, **({"tracestate": state} if state else {})}


class RouterTracer:
    """Follows the requests of one router. Belongs to one thread; exports on another."""

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
        self._followed: dict[str, _Followed] = {}
        """By the request's own id."""
        self._placements: dict[str, Placement] = {}
        """By the id under which an engine has or had a request that is followed."""

    def begin(self, request: EngineCoreRequest) -> None:
        """A request is there, and the table will hear of it next."""
        context = self._propagator.extract(carrier=request.trace_headers or {}, context=Context())
        client: SpanContext | None = get_current_span(context).get_span_context()
        if client is not None and not client.is_valid:
            client = None
        trace_id = self._ids.generate_trace_id() if client is None else client.trace_id
        sampled = self._sampler.should_sample(context, trace_id, "request", SpanKind.SERVER)
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return
        now_s, wall_ns = time.monotonic(), int(steady_time() * 1e9)
        waited_s = min(max(0.0, wall_ns / 1e9 - request.arrival_time), now_s)
        self._followed[request.request_id] = _Followed(
            Trail(request, now_s - waited_s, self._ids.generate_span_id),
            trace_id,
            client,
            sampled.trace_state or TraceState(),
            wall_ns - int(now_s * 1e9),
        )

    def note(self, action: Action, name_of: Callable[[str], str]) -> None:
        """Something is about to be done for a request. What goes to an engine gets its parent.

        name_of: from an engine's key to its name.
        """
        match action:
            case Explain(request_id, facts):
                if (followed := self._followed.get(request_id)) is not None:
                    followed.trail.chosen(facts, time.monotonic())
            case Add(engine, request):
                self._sent(request, name_of(engine))
            case Interrupted(request_id, setback, why, again):
                if (followed := self._followed.get(request_id)) is not None:
                    kind = "" if setback is Setback.MOVE else setback.name.lower()
                    followed.trail.interrupted(kind, why, again, time.monotonic())
            case Fail(request_id, error):
                self._end(request_id, "", str(error), type(error).__name__)

    def _sent(self, request: EngineCoreRequest, engine: str) -> None:
        core_id = request.request_id
        followed = self._followed.get(core_id.rpartition("/")[0])
        if followed is None:
            return
        span_id = followed.trail.sent(core_id, engine, time.monotonic())
        self._placements[core_id] = followed.trail.placements[-1]
        request.trace_headers = followed.headers(span_id)

    def take_stations(self, engine: str, stations: Iterable[RequestJourneyEvent]) -> None:
        """An engine tells how far requests have come there."""
        now_s = time.monotonic()
        for station in stations:
            placement = self._placements.get(station.request_id)
            if placement is not None and placement.engine == engine:
                placement.heard(station, now_s)

    def delivered(self, outputs: Sequence[EngineCoreOutput], ended_here: Iterable[str]) -> None:
        """Outputs were handed to those who wait. ended_here: requests that a stop string ended."""
        now_s = time.monotonic()
        for output in outputs:
            followed = self._followed.get(output.request_id)
            if followed is None:
                continue
            if output.new_token_ids:
                followed.trail.delivered(len(output.new_token_ids), now_s)
            if output.finish_reason is not None:
                self._end(output.request_id, str(output.finish_reason))
        for request_id in ended_here:
            self._end(request_id, "stop")

    def withdrawn(self, request_ids: Iterable[str]) -> None:
        """Nobody wants these any more; those that have ended are none of them."""
        for request_id in request_ids:
            self._end(request_id, "abort")

    def close(self) -> None:
        """Send what is left, within a few seconds. May block for so long."""
        for request_id in list(self._followed):
            self._end(request_id, "", "the router was shut down", "shutdown")
        self._sender.close()

    def _end(self, request_id: str, reason: str, error: str = "", error_type: str = "") -> None:
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        trail = followed.trail
        for placement in trail.placements:
            self._placements.pop(placement.core_id, None)
        trail.end(time.monotonic(), reason, error, error_type)
        for facts in spans_of(trail, self._model_name):
            self._sender.send(self._span(followed, facts))

    def _span(self, followed: _Followed, facts: SpanFacts) -> ReadableSpan:
        def to_ns(time_s: float) -> int:
            return followed.epoch_ns + int(time_s * 1e9)

        span_id = self._ids.generate_span_id() if facts.span_id is None else facts.span_id
        parent = facts.parent_id
        return ReadableSpan(
            facts.name,
            followed.span_context(span_id),
            followed.client if parent is None else followed.span_context(parent),
            self._engine(facts.engine) if facts.engine else self._own,
            facts.attributes,
            [Event(name, timestamp=to_ns(time_s)) for name, time_s in facts.events],
            kind=KINDS[facts.kind],
            status=Status(StatusCode.ERROR, facts.error) if facts.error else Status(),
            start_time=to_ns(facts.began_s),
            end_time=to_ns(facts.ended_s),
        )


def _resource(service: str, instance: str) -> Resource:
    return Resource.create({"service.name": service, "service.instance.id": instance})
