"""Makes one OpenTelemetry span for each request, from its arrival to its last output.

The times in it are the core's, which reports the stations of its requests (`RequestJourneyEvent`).
Names of attributes follow the semantic conventions for generative AI where there are any. Importing
this needs the extra `tracing`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestJourneyEvent,
)
from diptych_protocol import RequestJourneyEventType as Station
from diptych_protocol.wire import steady_time

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 3.0
"""The time limit of one batch, with all its retries."""
FLUSH_TIMEOUT_S = 5.0
"""How long `close` waits for what has not been sent yet."""


class SpanSender:
    """A queue of ended spans, and the thread that exports them to an OTLP endpoint.

    An endpoint that is down, slow or hostile causes no harm but the loss of spans. The queue is
    bounded, only the status line and the headers of an answer are read, and the end has a deadline.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.processor = BatchSpanProcessor(exporter)

    def send(self, span: ReadableSpan) -> None:
        """Queue a span. If the queue is full, the oldest span is dropped."""
        self.processor.on_end(span)

    def close(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Send what is left. This blocks until it is sent, or for the time limit at most."""
        ending = threading.Thread(target=self.processor.shutdown, daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            log.warning("the OTLP endpoint did not take the last spans in %g s", timeout_s)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to a URL such as http://HOST:4318/v1/traces."""
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S, session=_Deaf())


class _Deaf(requests.Session):
    """Reads no bodies: an endless one would keep the thread, and could fill the memory."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        response = super().request(*args, **{**options, "stream": True})
        response.close()
        return response


SPAN_NAME = "llm_request"


@dataclass(slots=True)
class _Open:
    """A request whose span has not ended."""

    request: EngineCoreRequest
    num_output_tokens: int = 0
    stopped: bool = False
    """Whether a stop string ended it on this side."""
    reached: dict[Station, RequestJourneyEvent] = field(default_factory=dict)
    """The first event of each kind."""
    num_preemptions: int = 0


class RequestTracer:
    """Follows the requests of one front-end. One thread uses it, and another one exports."""

    def __init__(self, sender: SpanSender, *, model_name: str) -> None:
        resource = Resource.create({"service.name": "diptych"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(sender.processor)
        self._sender = sender
        self._tracer = provider.get_tracer("diptych")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._open: dict[str, _Open] = {}

    def begin(self, request: EngineCoreRequest) -> None:
        """Record that a request was sent."""
        self._open[request.request_id] = _Open(request)

    def take(self, message: EngineCoreOutputs) -> None:
        """Record the core's events, and end the spans of the requests that end with them."""
        for event in message.journey_events or ():
            traced = self._open.get(event.request_id)
            if traced is not None:
                traced.reached.setdefault(event.event_type, event)
                traced.num_preemptions = event.num_preemptions_so_far
        for output in message.outputs:
            traced = self._open.get(output.request_id)
            if traced is None:
                continue
            traced.num_output_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                del self._open[output.request_id]
                self._end(traced, output, output.finish_reason)

    def stopped(self, request_ids: Iterable[str]) -> None:
        """Record requests that ended by a stop string, which their core treats as aborted."""
        for request_id in request_ids:
            if request_id in self._open:
                self._open[request_id].stopped = True

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        self._open.clear()
        self._sender.close()

    def _end(self, traced: _Open, output: EngineCoreOutput, reason: FinishReason) -> None:
        request = traced.request
        headers = output.trace_headers or request.trace_headers or {}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier=headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(traced, output, reason),
            start_time=int(request.arrival_time * 1e9),
        )
        if reason is FinishReason.ERROR:
            span.set_status(StatusCode.ERROR, output.error)
        span.end(int(steady_time() * 1e9))

    def _attributes(
        self, traced: _Open, output: EngineCoreOutput, reason: FinishReason
    ) -> Mapping[str, AttributeValue]:
        request, last = traced.request, traced.reached.get(Station.FINISHED)
        prompt_tokens = len(request.prompt_token_ids or ())
        ended = FinishReason.STOP if traced.stopped else reason
        attributes: dict[str, AttributeValue] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request.shown_id,
            "gen_ai.response.finish_reasons": [str(ended)],
            "gen_ai.usage.input_tokens": last.prefill_total_tokens if last else prompt_tokens,
            "gen_ai.usage.output_tokens": traced.num_output_tokens,
            "diptych.cached_tokens": output.num_cached_tokens,
            "diptych.preemptions": traced.num_preemptions,
            **_times(traced.reached),
        }
        params = request.sampling_params
        if params is not None:
            attributes["gen_ai.request.temperature"] = params.temperature
            attributes["gen_ai.request.top_p"] = params.top_p
            attributes["gen_ai.request.max_tokens"] = params.max_tokens or 0
        return attributes


def _times(reached: Mapping[Station, RequestJourneyEvent]) -> dict[str, AttributeValue]:
    """Seconds between the stations of a request; of those that it came by."""
    times: dict[str, AttributeValue] = {}
    for name, begin, end in (
        ("gen_ai.latency.time_in_queue", Station.QUEUED, Station.SCHEDULED),
        ("gen_ai.latency.time_in_model_prefill", Station.SCHEDULED, Station.FIRST_TOKEN),
        ("gen_ai.latency.time_in_model_decode", Station.FIRST_TOKEN, Station.FINISHED),
        ("gen_ai.latency.time_to_first_token", Station.QUEUED, Station.FIRST_TOKEN),
        ("gen_ai.latency.e2e", Station.QUEUED, Station.DEPARTED),
    ):
        if begin in reached and end in reached:
            times[name] = reached[end].ts_monotonic - reached[begin].ts_monotonic
    return times
