"""Starts the sender of a router's spans, without importing OpenTelemetry if there is none."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from diptych_frontend.observability.tracing import start_sender
from diptych_protocol import RouterConfig

if TYPE_CHECKING:
    from diptych_router.telling.router_tracer import RouterTracer


def start_router_tracer(config: RouterConfig) -> RouterTracer | None:
    """Return what makes spans of a router's requests, if the configuration names an endpoint.

    Raises as `start_sender`.
    """
    sender = start_sender(config.otlp_traces_endpoint)
    if sender is None:
        return None
    from diptych_router.telling.router_tracer import RouterTracer

    return RouterTracer(sender, model_name=config.name, instance=socket.gethostname())
