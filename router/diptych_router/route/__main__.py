"""The route: `python -m diptych_router.route --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from diptych_frontend.anthropic.answers import ANTHROPIC
from diptych_frontend.browsers import BrowserGate, BrowserRules
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.api_keys import ApiKeys, KeyGate
from diptych_frontend.openai.asgi import BodyReader, Boundary, unknown_path
from diptych_frontend.openai.mounted import follow
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.openai.tls import Certificate
from diptych_frontend.probes import Probes
from diptych_frontend.program import run_program
from diptych_frontend.vllm_api.scoring import RERANK_PATHS, SCORE_PATHS
from diptych_protocol.command_line import config_in
from diptych_protocol.router_settings import RouteConfig
from diptych_router.program.arguments import add_door
from diptych_router.program.leaving import Leaving, openness
from diptych_router.route.proxy import MAX_BODY_BYTES, Proxy, not_here

log = logging.getLogger(__name__)

PATHS: Final = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", *SCORE_PATHS,
    *RERANK_PATHS, "/tokenize", "/detokenize",
)  # fmt: skip
"""Paths whose bodies name a model."""
KEPT: Final = ("/v1/files", "/v1/batches", "/v1/responses", "/v1/kv_transfer")
"""What is under these paths is kept by one service, and names no model."""


@asynccontextmanager
async def routing(
    config: RouteConfig, keys: ApiKeys | None = None
) -> AsyncIterator[tuple[ASGIApp, Proxy, ServerMetrics]]:
    """The app of a route."""
    metrics = ServerMetrics(config.name)
    proxy = Proxy(config, metrics.registry, keys)
    methods = ["GET", "POST", "DELETE"]
    router = Router(
        [
            *(Route(path, proxy, methods=["POST"]) for path in PATHS),
            Route("/v1/models", proxy.models),
            Route("/v1/models/{model:path}", proxy.model),
            *Probes(proxy, metrics).routes(),
            *(Route(path, not_here, methods=methods) for path in KEPT if path not in PATHS),
            *(Route(f"{path}/{{rest:path}}", not_here, methods=methods) for path in KEPT),
        ],
        redirect_slashes=False,
        default=unknown_path,
    )
    app: ASGIApp = BodyReader(router, MAX_BODY_BYTES)
    if keys is not None:
        app = KeyGate(app, keys)
    rules = BrowserRules(frozenset(config.allowed_hosts))
    app = BrowserGate(app, rules, any_host=keys is not None)
    app = Boundary(app, on_answer=metrics.count_answer, dialects={"/v1/messages": ANTHROPIC})
    try:
        yield app, proxy, metrics
    finally:
        await proxy.close()


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m diptych_router.route",
        description="The route: one address for the models of several services.",
    )
    parser.add_argument("--config", type=Path, required=True, help="RouteConfig as JSON")
    add_door(parser)
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    config = config_in(args.config, RouteConfig)
    listener = listen(args.host, args.port)
    keys = ApiKeys(args.api_keys) if args.api_keys is not None else None
    certificate = Certificate(args.tls) if args.tls is not None else None
    log.info("%s", openness(args.host, keys, certificate))
    async with routing(config, keys) as (app, proxy, metrics):
        held = (each for each in (keys, certificate) if each)
        following = asyncio.create_task(follow(*held, *proxy.certificates.values()))
        leaving = Leaving(app, proxy, args.linger_seconds)
        await serve_sites(
            Site(leaving, listener, certificate.context if certificate is not None else None),
            drain=leaving.drain,
            drain_timeout_s=args.linger_seconds + config.drain_seconds,
            on_lag=metrics.loop_lag.observe,
        )
        following.cancel()


def main() -> None:
    run_program("route", run(parse_arguments(sys.argv[1:])))


if __name__ == "__main__":
    main()
