"""An OTLP endpoint: an HTTP server that takes spans as a collector does, and keeps them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Received:
    """A span as it came."""

    span: Span
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        """Empty: it has none."""
        return self.span.parent_span_id.hex()

    @property
    def began(self) -> int:
        """In nanoseconds of Unix time, as `ended`."""
        return self.span.start_time_unix_nano

    @property
    def ended(self) -> int:
        return self.span.end_time_unix_nano


@contextmanager
def span_collector() -> Iterator[tuple[str, list[Received]]]:
    """The URL that spans go to, and those that have come."""
    received: list[Received] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.extend(_spans_in(ExportTraceServiceRequest.FromString(body)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    with http_server(Handler) as url:
        yield url, received


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Somebody who answers at an OTLP endpoint's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans_in(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield Received(span, _values(span.attributes), resource)


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        value = getattr(attribute.value, attribute.value.WhichOneof("value"))
        is_list = attribute.value.HasField("array_value")
        found[attribute.key] = [x.string_value for x in value.values] if is_list else value
    return found
