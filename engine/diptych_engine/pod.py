"""The front-end of an engine pod: its probes, its API, its admin port, and how it drains."""

from __future__ import annotations

import argparse
import asyncio
import logging
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import build_admin_app, seconds_of
from diptych_frontend.admin.control import MAX_DRAIN_S, ControlRoutes, WeightRoutes
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.launcher import CoreProcess
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import exchange_of
from diptych_frontend.openai.responses import json_response
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.probes import build_probe_app
from diptych_protocol import DiptychError, EngineConfig

log = logging.getLogger(__name__)

STANDBY_AFTER_S = 2.0
"""The first steps of a core have the processors for themselves."""
STANDBY_AGAIN_S = 60.0
"""After one that has ended while it stood by, as for want of memory."""


class Standby:
    """The core that takes over from one that dies, if there is to be one."""

    def __init__(self, config: EngineConfig, public: str | None, keys_dir: Path | None) -> None:
        """public: the endpoint for routers."""
        self._make = partial(CoreProcess, config, public, keys_dir, stands_by=True)
        self._wanted = config.standby
        self._core: CoreProcess | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Have one from soon on, beside a core that serves."""
        if self._wanted:
            self._task = asyncio.create_task(self._keep(), name="standby")

    async def _keep(self) -> None:
        after_s = STANDBY_AFTER_S
        while True:
            await asyncio.sleep(after_s)
            cause: Exception
            try:
                self._core = self._make()
                cause = await self._core.wait()
            except OSError as exc:  # there can be no other process now
                cause = exc
            after_s = STANDBY_AGAIN_S
            log.warning("%s: it stood by; the next one starts in %d s", cause, after_s)

    def take(self, former: CoreProcess | None) -> CoreProcess | None:
        """Let it serve in place of one that has ended, and return it. None: there is none."""
        self._cancel()
        core, self._core = self._core, None
        if core is None or former is None:
            return None
        if former.ended() is None or core.ended() is not None:
            core.stop()
            return None
        core.take_over()
        return core

    def close(self) -> None:
        """Have none any more. Safe to call twice."""
        self._wanted = False
        self._cancel()
        if self._core is not None:
            self._core.stop()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


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
        return json_response(await self._engine.drain_report())

    async def drain(self, request: Request) -> Response:
        """Drain, and answer once drained or after `timeout_s`."""
        timeout_s = seconds_of(request, "timeout_s", self._drain_seconds, MAX_DRAIN_S)
        with UntilDisconnect(request.receive, exchange_of(request.scope)):
            return json_response(await self._engine.drain(timeout_s))
        return Response(status_code=204)  # the caller has left


async def serve(
    args: argparse.Namespace,
    config: EngineConfig,
    public: str | None,
    core: CoreProcess | None,
    standby: Standby,
) -> CoreProcess | None:
    """Serve until SIGTERM, or until the core dies: then return the one that has taken over.

    public: the endpoint for routers. core: the engine's own, if it starts already. Raises
    `EngineDeadError` when it dies, and none takes over.
    """
    listener = listen(args.host, args.port)
    api_listener = listen(args.host, args.api_port) if args.api_port is not None else None
    admin_listener = listen(args.host, args.admin_port) if args.admin_port is not None else None
    engine = AsyncLLM(
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
        routes = [*admin.routes(), *ControlRoutes(engine).routes(), *WeightRoutes(engine).routes()]
        sites.append(Site(build_admin_app(args.keys, routes), admin_listener))
    try:
        await engine.ready()  # last, because the core loads while the sites are built
    except BaseException:
        engine.shutdown()
        raise

    async def drain() -> None:
        standby.close()
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
    end = death if core is None else asyncio.create_task(core.wait())  # death may be told later
    standby.start()
    try:
        await asyncio.wait((server, death, end), return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            server.result()
            return None
        successor = standby.take(core)
        if successor is None:
            raise await death  # the pod is restarted as a whole
        log.warning("%s; the one that stood by takes over", await end)
        return successor
    finally:
        for task in (server, death, end):
            task.cancel()
        await asyncio.gather(server, death, end, return_exceptions=True)
        engine.shutdown()
