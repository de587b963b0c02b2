"""One process that serves the router's API."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from diptych_frontend.app import build_app
from diptych_frontend.batches_api.batch_run import Manners
from diptych_frontend.batches_api.service import BatchService
from diptych_frontend.browsers import BrowserRules
from diptych_frontend.core_client.curve import read_key_ring
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.observability.tracing import start_sender
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.mounted import follow
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.openai.tls import Certificate
from diptych_frontend.quotas.books import Books
from diptych_frontend.quotas.quotas import Quotas
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import RouterConfig
from diptych_router.engines.discovery import parse_targets
from diptych_router.program.arguments import read_config
from diptych_router.program.leaving import Leaving, openness
from diptych_router.program.picker_process import bracketed, picking
from diptych_router.requests.pool_client import PoolClient
from diptych_router.telling.admin_port import admin_app
from diptych_router.telling.explanations import Explanations
from diptych_router.telling.metrics import RouterMetrics
from diptych_router.telling.page.control import read_control
from diptych_router.telling.page.panels import panels_now
from diptych_router.telling.page.routes import Page

if TYPE_CHECKING:
    from diptych_router.telling.router_tracer import RouterTracer

log = logging.getLogger(__name__)

COLLECT_AFTER = 20_000
"""How many more objects are made than freed before the garbage collector examines the young ones.
Each open request has a few hundred."""


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    config = read_config(args)
    listener, admin_listener = listen(args.host, args.port), None
    if args.admin_port is not None:
        admin_listener = listen(args.admin_host or args.host, args.admin_port)
    keys = ApiKeys(args.api_keys) if args.api_keys is not None else None
    certificate = Certificate(args.tls) if args.tls is not None else None
    log.info("%s", openness(args.host, keys, certificate))
    tracer = start_router_tracer(config)
    client = _build_pool_client(config, args, tracer)
    metrics = ServerMetrics(client.model_name, client.stats_by_engine)
    metrics.registry.register(RouterMetrics(client))
    explanations = Explanations(
        client.table.records, client.name_of, policy=config.policy, disaggregate=config.disaggregate
    )
    batches = _batches(config, args, client, metrics, keys)
    quotas = _quotas(args, client, metrics, keys)
    app = _app(config, client, explanations, metrics, keys, batches, quotas)
    leaving = Leaving(app, client, args.linger_seconds, batches)
    sites = [Site(leaving, listener, certificate.context if certificate is not None else None)]
    if admin_listener is not None:
        admin = admin_app(client, explanations, args.keys, keys, certificate)
        sites.append(Site(admin, admin_listener))
    if client.pools.refused_settings:
        log.error("%s", client.why_not_ready())
    client.start()
    # Requests leave no cycles, so the collector would mostly look in vain, at what is here for good
    # above all: tokenizer, templates, modules.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    followed = [held for held in (keys, certificate, quotas) if held is not None]
    following = asyncio.create_task(follow(*followed))
    own = f"{bracketed(args.advertise_host or args.host)}:{args.port}"
    try:
        async with picking(client, own, args.host, args.picker_port):
            await serve_sites(
                *sites,
                drain=leaving.drain,
                drain_timeout_s=args.linger_seconds + config.drain_seconds,
                on_lag=metrics.loop_lag.observe,
            )
    finally:
        following.cancel()
        if batches is not None:
            await batches.close()
        client.shutdown()
        if quotas is not None:
            await quotas.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _app(
    config: RouterConfig,
    client: PoolClient,
    explanations: Explanations,
    metrics: ServerMetrics,
    keys: ApiKeys | None,
    batches: BatchService | None,
    quotas: Quotas | None,
) -> ASGIApp:
    page = None
    if config.ui:
        page = Page(
            partial(panels_now, client),
            explanations.explanation,
            model=client.model_name,
            images=lambda: client.takes_images,
            leaving=lambda: client.leaving,
            control=read_control(),
        )
    return build_app(
        client,
        metrics=metrics,
        sampling=config.sampling,
        api_keys=keys,
        batches=batches,
        extra_routes=page.routes() if page is not None else (),
        extra_open_paths=page.open_paths if page is not None else frozenset(),
        unknown_fields=config.unknown_fields,
        browsers=BrowserRules(frozenset(config.allowed_hosts), frozenset(config.allowed_origins)),
        quotas=quotas,
    )


def _batches(
    config: RouterConfig,
    args: argparse.Namespace,
    client: PoolClient,
    metrics: ServerMetrics,
    keys: ApiKeys | None,
) -> BatchService | None:
    if args.batch_directory is None:
        return None

    def is_busy() -> bool:
        waiting = (stats.num_waiting for stats in client.stats_by_engine().values())
        return client.num_held > 0 or any(waiting)

    manners = Manners(
        is_busy,
        has_priorities=lambda: client.input_processor.scheduling_policy == "priority",
        is_client=lambda name: name in keys.names if keys is not None else not name,
    )
    return BatchService(args.batch_directory, config.batches, metrics, manners)


def _quotas(
    args: argparse.Namespace, client: PoolClient, metrics: ServerMetrics, keys: ApiKeys | None
) -> Quotas | None:
    if keys is None:
        return None
    folder = args.batch_directory and args.batch_directory / "usage"
    quotas = Quotas(
        keys.limits,
        Books(folder, keys.signing_key),
        model_name=client.model_name,
        num_routers=client.pools.num_routers,
    )
    metrics.registry.register(quotas)
    return quotas


def start_router_tracer(config: RouterConfig) -> RouterTracer | None:
    """Return what makes spans of a router's requests, if the configuration names an endpoint.
    Raises as `start_sender`."""
    sender = start_sender(config.otlp_traces_endpoint)
    if sender is None:
        return None
    from diptych_router.telling.router_tracer import RouterTracer  # needs OpenTelemetry

    return RouterTracer(sender, model_name=config.name, instance=socket.gethostname())


def _build_pool_client(
    config: RouterConfig, args: argparse.Namespace, tracer: RouterTracer | None
) -> PoolClient:
    """The client of both pools. Needs a running event loop."""
    source = resolve_model(config.model, weights=False, vocabulary=True)
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
        targets={
            "prefill": parse_targets(args.prefill) if args.prefill is not None else [],
            "decode": parse_targets(args.decode),
        },
        read_keys=read_keys,
        serving=args.serving,
        tracer=tracer,
    )
