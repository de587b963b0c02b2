"""The front-end of an engine pod: its probes, its API, its admin port, and how it drains."""

from __future__ import annotations

import argparse
import asyncio
import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import build_admin_app, report, seconds_of
from diptych_frontend.admin.control import ControlRoutes
from diptych_frontend.admin.weights import WeightRoutes
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import exchange_of
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.probes import build_probe_app
from diptych_protocol import DiptychError, EngineConfig

log = logging.getLogger(__name__)

MAX_DRAIN_S = 86400.0


class AdminRoutes:
    """The routes for an operator on this pod; see `diptych_protocol.admin`."""

    def __init__(self, engine: AsyncLLM, drain_seconds: float) -> None:
        self._engine = engine
        self._drain_seconds = drain_seconds

    def routes(self) -> list[Route]:
        return [
            Route("/admin/state", self.state),
            Route("/admin/drain", self.drain, methods=["POST"]),
        ]

    async def state(self, request: Request) -> Response:
        return report(await self._engine.drain_report())

    async def drain(self, request: Request) -> Response:
        """Drain, and answer once drained or after `timeout_s`."""
        timeout_s = seconds_of(request, "timeout_s", self._drain_seconds, MAX_DRAIN_S)
        async with UntilDisconnect(request.receive, exchange_of(request.scope)):
            return report(await self._engine.drain(timeout_s))
        return Response(status_code=204)  # the caller has left


async def serve(
    args: argparse.Namespace, config: EngineConfig, public: str | None, core: CoreProcess | None
) -> None:
    """Serve until SIGTERM.

    public: the endpoint for routers. core: the engine's own, if it starts already. Raises
    `EngineDeadError` when it dies.
    """
    listener = listen(args.host, args.port)
    api_listener = listen(args.host, args.api_port) if args.api_port is not None else None
    admin_listener = listen(args.host, args.admin_port) if args.admin_port is not None else None
    engine = await AsyncLLM.start(
        config,
        core=core,
        public_endpoint=public,
        keys_dir=args.keys,
        reads_texts=api_listener is not None,  # routers send tokens to the core
    )
    metrics = ServerMetrics(engine.model_name, engine.stats_by_engine)
    sites = [Site(build_probe_app(engine, metrics), listener)]
    if api_listener is not None:
        from diptych_frontend.app import build_app  # late: behind routers there is no API

        sites.append(Site(build_app(engine, metrics=metrics), api_listener))
    if admin_listener is not None:
        admin = AdminRoutes(engine, config.drain_seconds)
        routes = [
            *admin.routes(),
            *ControlRoutes(engine).routes(),
            *WeightRoutes(engine).routes(),
        ]
        sites.append(Site(build_admin_app(args.keys, routes), admin_listener))

    async def drain() -> None:
        try:
            log.info("leaving: %s", await engine.drain(config.drain_seconds))
        except DiptychError as exc:
            log.warning("leaving without a drain: %s", exc)

    server = asyncio.create_task(
        serve_sites(
            *sites,
            drain=drain,
            drain_timeout_s=config.drain_seconds,
            on_lag=metrics.loop_lag.observe,
        )
    )
    death = asyncio.create_task(engine.died())
    try:
        await asyncio.wait((server, death), return_when=asyncio.FIRST_COMPLETED)
        if not server.done():
            raise death.result()  # the pod is restarted as a whole
        server.result()
    finally:
        for task in (server, death):
            task.cancel()
        await asyncio.gather(server, death, return_exceptions=True)
        engine.shutdown()
