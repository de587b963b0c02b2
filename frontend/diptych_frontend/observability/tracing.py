"""Reads the W3C trace context of requests, and starts the senders of spans."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diptych_frontend.installation import this_installation
from diptych_protocol import EngineConfig, InvalidRequestError

if TYPE_CHECKING:
    from diptych_frontend.observability.request_tracer import RequestTracer, SpanSender

TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?")
MAX_STATE_CHARS = 512
"""The length that W3C requires everybody to pass on. Longer states are dropped."""


def trace_context(parent: str | None, state: str | None) -> dict[str, str] | None:
    """Return a caller's trace context from the headers `traceparent` and `tracestate`; None if
    there is none, or one that the standard says to ignore."""
    if parent is None or not TRACE_PARENT.fullmatch(parent):
        return None
    if state and len(state) <= MAX_STATE_CHARS:
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}


def start_sender(endpoint: str | None) -> SpanSender | None:
    """Return a sender of spans to this OTLP endpoint; None without an endpoint.

    Raises `InvalidRequestError` if the needed packages are not installed.
    """
    if endpoint is None:
        return None
    try:
        # Takes a while to import, and few need it.
        from diptych_frontend.observability.request_tracer import SpanSender, otlp_exporter
    except ModuleNotFoundError as exc:
        raise InvalidRequestError(
            f"otlp_traces_endpoint needs {exc.name}: {this_installation().add_extras('tracing')}",
            param="otlp_traces_endpoint",
        ) from exc
    return SpanSender(otlp_exporter(endpoint))


def start_tracer(config: EngineConfig) -> RequestTracer | None:
    """Return a tracer of an engine's requests, if the configuration names an endpoint.

    Raises as `start_sender`.
    """
    sender = start_sender(config.otlp_traces_endpoint)
    if sender is None:
        return None
    from diptych_frontend.observability.request_tracer import RequestTracer

    return RequestTracer(sender, model_name=config.name)
