"""What probes and scrapers ask: an engine behind routers serves nothing else over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from importlib.metadata import version
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from diptych_frontend.browsers import BrowserGate, BrowserRules
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.asgi import Boundary, unknown_path
from diptych_frontend.openai.responses import Health, json_response
from diptych_protocol import EngineClient

METRICS_AGE_S = 1.0
"""Metrics are written at most once in this time, however often they are requested."""
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
"""Any other escaping of the library makes underscores of the colons in our names, which are legal
in every format; alerts and dashboards would find nothing."""
NO_SITES = BrowserRules()
HEALTH_TIMEOUT_S = 5.0
"""A health check that takes longer has failed."""


def build_probe_app(engine: EngineClient, metrics: ServerMetrics) -> ASGIApp:
    """Build an app for probes and scrapers only. It accepts no bodies, and so no prompts."""
    routes = Probes(engine, metrics).routes()
    router = Router(routes, redirect_slashes=False, default=unknown_path)
    app = BrowserGate(router, NO_SITES)
    return Boundary(app, on_answer=metrics.count_answer)


class Probed(Protocol):
    """What has an answer to probes; see `EngineClient`."""

    async def check_health(self) -> None: ...

    async def check_live(self) -> None: ...


class Probes:
    """Answers probes.

    Anybody may ask, so no question is passed on to an engine; the answers are already known.
    """

    def __init__(self, engine: Probed, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._written: dict[str, tuple[float, bytes, str]] = {}
        """When metrics were last written, the text and its content type, by its format."""

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/live", self.live),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
        ]

    async def health(self, request: Request) -> Response:
        """Report readiness: 200, or 503 with the reason."""
        return await self._answer(self._engine.check_health())

    async def live(self, request: Request) -> Response:
        """Report liveness: 200, or 503 with the reason to restart the pod."""
        return await self._answer(self._engine.check_live())

    async def _answer(self, check: Awaitable[None]) -> Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await check
        except TimeoutError:
            reason = f"the engine did not answer its health check in {HEALTH_TIMEOUT_S:g} s"
            return json_response(Health("unhealthy", reason), 503)
        except Exception as exc:
            return json_response(Health("unhealthy", str(exc) or type(exc).__name__), 503)
        return json_response(Health("ok"))

    async def metrics(self, request: Request) -> Response:
        wanted = request.headers.get("accept", "")
        # Two formats and no further parameters, of which a client could make up any number.
        accept = OPEN_METRICS if OPEN_METRICS.partition(";")[0] in wanted else "text/plain"
        written = self._written.get(accept)
        if written is None or time.monotonic() - written[0] >= METRICS_AGE_S:
            written = (time.monotonic(), *self._metrics.exposition(accept))
            self._written[accept] = written
        return Response(written[1], headers={"content-type": written[2]})

    async def version(self, request: Request) -> Response:
        return json_response({"version": version("diptych")})
