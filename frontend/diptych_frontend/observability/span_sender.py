"""Sends spans to an OTLP endpoint on a thread of its own.

An endpoint that is down, slow or hostile causes no harm but the loss of spans. The queue is
bounded, only the status line and the headers of an answer are read, and the end has a deadline.
Importing this needs the extra `tracing`.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 3.0
"""The time limit of one batch, with all its retries."""
FLUSH_TIMEOUT_S = 5.0
"""How long `close` waits for what has not been sent yet."""


class SpanSender:
    """A queue of ended spans, and the thread that exports them."""

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
