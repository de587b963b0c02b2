"""The router: `python -m diptych_router --config FILE --prefill HOST:PORT,... --decode ...`."""

from __future__ import annotations

import argparse
import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from diptych_frontend.admin.calls import build_admin_app, report
from diptych_frontend.core_client.curve import read_key_ring
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.app import build_app
from diptych_frontend.openai.mounted import follow
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.openai.tls import Certificate
from diptych_frontend.program import run_program
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import RouterConfig
from diptych_router.discovery import parse_targets
from diptych_router.leaving import Leaving
from diptych_router.pool_client import PoolClient
from diptych_router.promise_metrics import PromiseCollector
from diptych_router.report import router_report
from diptych_router.tracing import start_router_tracer

if TYPE_CHECKING:
    from diptych_router.router_tracer import RouterTracer

log = logging.getLogger(__name__)


def build_pool_client(
    config: RouterConfig, args: argparse.Namespace, tracer: RouterTracer | None
) -> PoolClient:
    """The client of both pools. Needs a running event loop."""
    source = resolve_model(config.model, weights=False)
    renderer = TextRenderer(source)
    inputs = InputProcessor(
        renderer,
        max_model_len=source.config.max_position_embeddings,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
        reasoning_parser=config.reasoning_parser,
    )
    read_keys = None
    if args.keys is not None:
        read_keys = partial(read_key_ring, args.keys)
        read_keys()  # keys that cannot be read are an error of this start, not of a connection
    return PoolClient(
        config,
        inputs,
        OutputProcessor(renderer.tokenizer, reasoning_parser=config.reasoning_parser),
        targets={"prefill": parse_targets(args.prefill), "decode": parse_targets(args.decode)},
        read_keys=read_keys,
        serving=args.serving,
        tracer=tracer,
    )


def admin_app(client: PoolClient, keys_dir: Path) -> ASGIApp:
    """What the operator asks: `GET /admin/state`."""

    async def state(request: Request) -> Response:
        await client.refresh_stats()
        return report(router_report(client))

    return build_admin_app(keys_dir, [Route("/admin/state", state)])


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    listener = listen(args.host, args.port)
    admin_listener = (
        listen(args.admin_host or args.host, args.admin_port)
        if args.admin_port is not None
        else None
    )
    config = msgspec.json.decode(args.config.read_bytes(), type=RouterConfig)
    config.check()
    keys = ApiKeys(args.api_keys) if args.api_keys is not None else None
    certificate = Certificate(args.tls) if args.tls is not None else None
    log.info("%s", _openness(args.host, keys, certificate))
    tracer = start_router_tracer(config)
    client = build_pool_client(config, args, tracer)
    metrics = ServerMetrics(client.model_name, client.stats_by_engine)
    metrics.registry.register(PromiseCollector(client.model_name, client.table.promises))
    app = build_app(client, metrics=metrics, api_keys=keys)
    leaving = Leaving(app, client, args.linger_seconds)
    sites = [Site(leaving, listener, certificate.context if certificate is not None else None)]
    if admin_listener is not None:
        sites.append(Site(admin_app(client, args.keys), admin_listener))
    client.start()
    following = asyncio.create_task(follow(*(held for held in (keys, certificate) if held)))
    try:
        await serve_sites(
            *sites,
            drain=leaving.drain,
            drain_timeout_s=args.linger_seconds + config.drain_seconds,
            on_lag=metrics.loop_lag.observe,
        )
    finally:
        following.cancel()
        client.shutdown()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _openness(host: str, keys: ApiKeys | None, certificate: Certificate | None) -> str:
    """Who may use the API, in a line."""
    who = "open to whoever reaches it" if keys is None else f"{len(keys.names)} API keys"
    return f"the API at {host}: {who}, {'TLS' if certificate is not None else 'no TLS'}"


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 600:
        raise argparse.ArgumentTypeError("must be between 0 and 600")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diptych_router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="RouterConfig as JSON")
    parser.add_argument("--prefill", required=True, help="cores of the prefill pool: host:port,...")
    parser.add_argument("--decode", required=True, help="cores of the decode pool: host:port,...")
    parser.add_argument("--keys", type=Path, help="directory with the service's keys")
    parser.add_argument("--serving", type=Path, help="serving.json: the revisions that may serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--admin-port", type=int, help="for the operator; needs --keys")
    parser.add_argument("--admin-host", help="where that port listens, if not at --host")
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="DIR",
        help="let nobody use the API without the content of one of these files, whose names are "
        "the clients'; read again when they change",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="serve HTTPS with DIR/tls.crt and DIR/tls.key, read again when they change",
    )
    parser.add_argument(
        "--linger-seconds",
        type=seconds,
        default=0.0,
        help="after SIGTERM, how long to take new requests from those who have not heard of it",
    )
    args = parser.parse_args()
    if args.admin_port is not None and args.keys is None:
        parser.error("--admin-port needs --keys: the admin token is there")
    run_program("router", run(args))


if __name__ == "__main__":
    main()
