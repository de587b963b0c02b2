"""The ASGI application: routes and layers put together around one `EngineClient`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.metrics import ServerMetrics
from diptych_frontend.openai.asgi import AccessLogStyle, ApiKey, BodyReader, Boundary
from diptych_frontend.openai.chat import ChatApi
from diptych_frontend.openai.completions import CompletionApi
from diptych_frontend.openai.embeddings import EmbeddingRoute
from diptych_frontend.openai.generation import GenerationRoute, unknown_model
from diptych_frontend.openai.rejection import RejectionCleanup, RejectRoute
from diptych_frontend.openai.request_workers import RequestWorkers
from diptych_frontend.openai.responses import Health, ModelCard, ModelList, encode
from diptych_protocol import DiptychError, EngineClient, InvalidRequestError

MAX_BODY_BYTES = 4 << 20
HEALTH_TIMEOUT_S = 5.0
"""A health check that takes longer is a failed one."""
REFRESH_TIMEOUT_S = 1.0

RefreshStats = Callable[[], Awaitable[object]]


def build_app(
    engine: EngineClient,
    *,
    served_names: Sequence[str] = (),
    api_key: str | None = None,
    metrics: ServerMetrics | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    access_log: AccessLogStyle = "off",
    extra_routes: Sequence[BaseRoute] = (),
    refresh_stats: RefreshStats | None = None,
) -> ASGIApp:
    """The OpenAI-compatible server of one engine client.

    Args:
        engine: started and stopped by the caller.
        served_names: the names under which clients may ask for the model; the engine's own name
            if there are none.
        api_key: if set, all routes but probes and metrics want it as a bearer token.
        metrics: one that knows `stats_by_engine` also reports on the engines.
        max_body_bytes: larger request bodies are refused with 413.
        access_log: one line a request on the logger `diptych.access`.
        extra_routes: further Starlette routes, behind the same layers.
        refresh_stats: brings the engines' statistics up to date before metrics are written.
    """
    names = tuple(served_names) or (engine.model_name,)
    metrics = metrics or ServerMetrics(engine.model_name)
    known = frozenset(names)
    probes = Probes(engine, metrics, refresh_stats)
    models = Models(engine, names)
    workers = RequestWorkers()
    completions = GenerationRoute(CompletionApi(), engine, known, metrics, workers)
    chat = GenerationRoute(ChatApi(), engine, known, metrics, workers)
    embeddings = EmbeddingRoute(engine, known, metrics, workers)
    router = Router(
        [
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/kv_transfer/reject", RejectRoute(engine, workers), methods=["POST"]),
            Route("/v1/models", models.list),
            Route("/v1/models/{model:path}", models.one),
            Route("/health", probes.health),
            Route("/live", probes.live),
            Route("/ping", probes.health, methods=["GET", "POST"]),
            Route("/metrics", probes.metrics),
            Route("/version", probes.version),
            *extra_routes,
        ],
        redirect_slashes=False,
        default=_unknown_path,
    )
    app: ASGIApp = BodyReader(router, max_body_bytes)
    if api_key is not None:
        app = ApiKey(app, api_key)
    app = Boundary(app, on_answer=metrics.count_answer, access_log=access_log)
    return RejectionCleanup(app, engine)


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise InvalidRequestError(f"no such path: {scope['path'][:200]}", status=404, code="not_found")


class Probes:
    """What machines ask about this server."""

    def __init__(
        self, engine: EngineClient, metrics: ServerMetrics, refresh_stats: RefreshStats | None
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._refresh_stats = refresh_stats

    async def health(self, request: Request) -> Response:
        """Readiness: 200, or 503 with the reason."""
        return await self._answer(self._engine.check_health())

    async def live(self, request: Request) -> Response:
        """Liveness: 200, or 503 with the reason to restart the pod."""
        return await self._answer(self._engine.check_live())

    async def _answer(self, check: Awaitable[None]) -> Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await check
        except TimeoutError:
            reason = f"the engine did not answer its health check in {HEALTH_TIMEOUT_S:g} s"
            return _json(Health("unhealthy", reason), 503)
        except Exception as exc:
            return _json(Health("unhealthy", str(exc) or type(exc).__name__), 503)
        return _json(Health("ok"))

    async def metrics(self, request: Request) -> Response:
        if self._refresh_stats is not None:
            # An engine that is busy or gone leaves its last statistics standing.
            with contextlib.suppress(TimeoutError, DiptychError):
                async with asyncio.timeout(REFRESH_TIMEOUT_S):
                    await self._refresh_stats()
        body, content_type = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        return _json({"version": version("diptych")})


class Models:
    """/v1/models: one model, under each of its names, and its adapters."""

    def __init__(self, engine: EngineClient, names: Sequence[str]) -> None:
        self._engine = engine
        self._created = int(time.time())
        self._names = names

    def _cards(self) -> dict[str, ModelCard]:
        created, length = self._created, self._engine.max_model_len
        base = self._names[0]
        cards = {name: ModelCard(name, created, length) for name in self._names}
        for name in self._engine.adapters:
            cards.setdefault(name, ModelCard(name, created, length, base))
        return cards

    async def list(self, request: Request) -> Response:
        return _json(ModelList(list(self._cards().values())))

    async def one(self, request: Request) -> Response:
        cards = self._cards()
        name = request.path_params["model"]
        if name not in cards:
            raise unknown_model(name, frozenset(cards))
        return _json(cards[name])


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
