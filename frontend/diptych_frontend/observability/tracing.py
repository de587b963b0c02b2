"""Where the spans of requests begin: the W3C trace context of callers, and who follows it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diptych_protocol import EngineConfig, InvalidRequestError

if TYPE_CHECKING:
    from diptych_frontend.observability.request_tracer import RequestTracer

TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?")
MAX_STATE_CHARS = 512
"""What W3C asks everybody to pass on; longer ones are dropped."""


def trace_context(parent: str | None, state: str | None) -> dict[str, str] | None:
    """A caller's trace context, from the headers `traceparent` and `tracestate`; None if there is
    none, or one that the standard says to ignore."""
    if parent is None or not TRACE_PARENT.fullmatch(parent):
        return None
    if state and len(state) <= MAX_STATE_CHARS:
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}


def start_tracer(config: EngineConfig) -> RequestTracer | None:
    """Who sends the spans to where the configuration says; None if it says nothing.

    Raises `InvalidRequestError` if what that takes is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    try:
        # Takes a while to import, and few need it.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from diptych_frontend.observability.request_tracer import EXPORT_TIMEOUT_S, RequestTracer
    except ModuleNotFoundError as exc:
        raise InvalidRequestError(
            f"otlp_traces_endpoint needs {exc.name}: install `diptych[tracing]`",
            param="otlp_traces_endpoint",
        ) from exc
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    return RequestTracer(exporter, model_name=config.name)
