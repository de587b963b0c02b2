"""Spans are sent beside everything else, whatever the endpoint does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags
from span_collector import http_server, span_collector
from waits import PATIENCE_S

from diptych_frontend.observability.request_tracer import SpanSender, otlp_exporter


def span(number: int = 1) -> ReadableSpan:
    context = SpanContext(1, number, False, TraceFlags(TraceFlags.SAMPLED))
    return ReadableSpan(str(number), context, start_time=1, end_time=2)


class Stuck(SpanExporter):
    """Takes batches, but not before it is let go."""

    def __init__(self) -> None:
        self.took: list[str] = []
        self.called, self.go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.go.wait(PATIENCE_S)
        self.took += [each.name for each in spans]
        return SpanExportResult.SUCCESS


def test_the_end_sends_what_is_left() -> None:
    with span_collector() as (url, received):
        sender = SpanSender(otlp_exporter(url))
        sender.send(span())
        sender.close()
    assert [each.name for each in received] == ["1"]


def test_the_end_does_not_wait_for_an_endpoint_that_takes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter = Stuck()
    sender = SpanSender(exporter)
    sender.send(span())
    with caplog.at_level(logging.WARNING):
        sender.close(timeout_s=0.1)
    assert "did not take the last spans" in caplog.text
    assert not exporter.took
    exporter.go.set()


def test_spans_that_cannot_be_sent_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first; what is kept is bounded."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    exporter = Stuck()
    sender = SpanSender(exporter)
    for number in range(1, 11):
        sender.send(span(number))
    assert exporter.called.wait(PATIENCE_S)
    for number in range(11, 1001):
        sender.send(span(number))
    exporter.go.set()
    sender.close(PATIENCE_S)
    assert exporter.took == [str(number) for number in [*range(1, 11), *range(901, 1001)]]


def test_an_answer_without_an_end_is_not_read() -> None:
    """Nor may it keep the thread that sends."""
    hung_up = threading.Event()

    class Talker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            deadline = time.monotonic() + PATIENCE_S
            try:
                while time.monotonic() < deadline:
                    self.wfile.write(b"." * 4096)
                    time.sleep(0.01)
            except OSError:
                hung_up.set()

        def log_message(self, *args: object) -> None:
            pass

    with http_server(Talker) as url:
        sender = SpanSender(otlp_exporter(url))
        sender.send(span())
        sender.close()
        assert hung_up.wait(PATIENCE_S)
