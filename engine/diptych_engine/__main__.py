"""An engine pod: one EngineCore, and its front-end.

`python -m diptych_engine --config FILE --port 8000
    [--api-port 8001 --core-port 5557 --kv-port 5558 --admin-port 8081 --keys DIR]`

Its HTTP port answers probes and scrapers. It has an OpenAI API only with `--api-port`, for example
for another project's router. That port has no authentication.

The first SIGTERM or SIGINT drains: readiness fails, routers are told, and the program ends with 0
as soon as neither a request nor a lease is left, or after `drain_seconds`. The second one ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import build_admin_app, report, seconds_of
from diptych_frontend.admin.control import ControlRoutes
from diptych_frontend.admin.weights import WeightRoutes
from diptych_frontend.app import build_app, build_probe_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import exchange_of
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.program import run_program
from diptych_protocol import DiptychError, EngineConfig, InvalidRequestError, KVTransferConfig

log = logging.getLogger(__name__)

MAX_DRAIN_S = 86400.0


def pod_config(args: argparse.Namespace) -> EngineConfig:
    """Return the shared configuration with this pod's own values."""
    config = msgspec.json.decode(args.config.read_bytes(), type=EngineConfig)
    own = {"engine_id": args.engine_id, "node": args.node, "zone": args.zone}
    config = msgspec.structs.replace(config, **{name: x for name, x in own.items() if x})
    if args.kv_port is not None:
        transfer = msgspec.structs.replace(
            config.kv_transfer or KVTransferConfig(),
            listen_host=args.host,
            listen_port=args.kv_port,
            advertise_host=args.advertise_host or args.host,
        )
        config = msgspec.structs.replace(config, kv_transfer=transfer)
    return config


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


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM. Raises `EngineDeadError` when the core dies."""
    if args.admin_port is not None and args.keys is None:
        raise InvalidRequestError("--admin-port needs --keys, which has its token", param="keys")
    listener = listen(args.host, args.port)
    api_listener = listen(args.host, args.api_port) if args.api_port is not None else None
    admin_listener = listen(args.host, args.admin_port) if args.admin_port is not None else None
    public = f"tcp://{args.host}:{args.core_port}" if args.core_port is not None else None
    config = pod_config(args)
    engine = await AsyncLLM.start(
        config,
        public_endpoint=public,
        keys_dir=args.keys,
        reads_texts=api_listener is not None,  # routers send tokens to the core
    )
    metrics = ServerMetrics(engine.model_name, engine.stats_by_engine)
    sites = [Site(build_probe_app(engine, metrics), listener)]
    if api_listener is not None:
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diptych_engine", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port of probes and metrics")
    parser.add_argument("--api-port", type=int, help="HTTP port of the OpenAI API, if wanted")
    parser.add_argument("--core-port", type=int, help="ZMQ port of the core, for routers")
    parser.add_argument("--kv-port", type=int, help="UCX port of the hinge")
    parser.add_argument("--admin-port", type=int, help="HTTP port for operators; needs --keys")
    parser.add_argument("--advertise-host", help="address at which other pods reach this one")
    parser.add_argument("--engine-id", help="the pod's name")
    parser.add_argument("--node", help="name of the node that it runs on; empty: not known")
    parser.add_argument("--zone", help="name of the node's zone; empty: not known")
    parser.add_argument("--keys", type=Path, help="directory with the service's keys and token")
    args = parser.parse_args()
    run_program(args.engine_id or "engine", run(args))


if __name__ == "__main__":
    main()
