"""Answers a router's admin port: the operator's polls, users' questions about requests, and what a
service was asked of late, for whoever finds out how many engines of which kind it should have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from diptych_frontend.admin.calls import build_admin_app, seconds_of
from diptych_frontend.core_client.curve import read_keys
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.responses import json_response
from diptych_frontend.openai.tls import Certificate
from diptych_protocol import InvalidRequestError, KVTransferStats
from diptych_protocol.admin import (
    EngineReport,
    Explanation,
    PromiseCount,
    RouterReport,
)
from diptych_router.engines.engine_link import EngineLink
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.pools.pools import Pools
from diptych_router.requests.promises import Kind
from diptych_router.requests.records import MOST_REQUESTS
from diptych_router.telling.explanations import Explanations
from diptych_router.telling.load_report import load_report

DEFAULT_LIMIT: Final = 20
MOST_WAIT_S: Final = 60.0
LOOK_S: Final = 0.1


def request_routes(known: Explanations) -> list[BaseRoute]:

    async def newest(request: Request) -> Response:
        return json_response(known.newest(_limit_of(request)))

    async def why(request: Request) -> Response:
        return json_response(_explained(known, request.path_params["request_id"]))

    return [Route("/admin/requests", newest), Route("/admin/requests/{request_id:path}/why", why)]


def _explained(known: Explanations, request_id: str) -> Explanation:
    """Raises `InvalidRequestError` for an id that cannot be one, or that is not remembered."""
    found = known.explanation(request_id)
    if not found.requests:
        newest = known.newest(1)
        raise InvalidRequestError(
            f"this router remembers no request {request_id!r}: it remembers the newest "
            f"{newest.most_remembered} since its start, now {newest.num_remembered}; if the "
            "service has other routers, one of them may know it",
            param="request_id",
            status=404,
            code="not_found",
        )
    return found


def _limit_of(request: Request) -> int:
    """How many requests are asked for. Raises `InvalidRequestError`."""
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    limit = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1 <= limit <= MOST_REQUESTS:
        raise InvalidRequestError(f"limit must be in 1..{MOST_REQUESTS}", param="limit")
    return limit


def admin_app(
    client: PoolClient,
    explanations: Explanations,
    keys_dir: Path,
    api_keys: ApiKeys | None,
    certificate: Certificate | None = None,
) -> ASGIApp:
    """Return the app of the admin port. Each report of the router's state asks the engines; with
    `wait`, once a request is held or these seconds are over."""

    async def state(request: Request) -> Response:
        until = time.monotonic() + seconds_of(request, "wait", 0.0, MOST_WAIT_S)
        while not (client.num_held or client.leaving) and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        await client.refresh_stats()
        return json_response(router_report(client, api_keys, certificate))

    async def load(_: Request) -> Response:
        return json_response(await load_report(client, explanations, read_keys(keys_dir)))

    routes = [
        Route("/admin/state", state),
        Route("/admin/load", load),
        *request_routes(explanations),
    ]
    return build_admin_app(keys_dir, routes)


def router_report(
    client: PoolClient, api_keys: ApiKeys | None = None, certificate: Certificate | None = None
) -> RouterReport:
    """Return the present state, with the last statistics of engines."""
    reason = client.why_not_ready()
    pools, trial = client.pools, client.pools.trial
    newest = next(iter(client.table.records), None)
    return RouterReport(
        ready=not reason,
        reason=reason,
        open_requests=len(client.output_processor.answers),
        held_requests=client.num_held,
        serving_revisions=list(pools.serving.revisions),
        engines=[_engine_report(pools, link) for link in pools.links.values() if link.up],
        canaries=list(pools.canaries.values()),
        refused_settings=pools.refused_settings,
        promises=_told(client.table.promises.counts),
        recent_promises=_told(client.table.promises.recent.total(time.monotonic())),
        admits_nobody=api_keys is not None and not api_keys.names,
        trial=None if trial is None else trial.report(client.table.num_answering_for(trial)),
        refused_certificate="" if certificate is None else certificate.complaint,
        expired_certificate="" if certificate is None else certificate.expired,
        quiet_s=None if newest is None else time.monotonic() - newest.began_s,
        left_out_keys=[] if api_keys is None else api_keys.left_out,
    )


def _told(counts: Mapping[Kind, int]) -> list[PromiseCount]:
    return [PromiseCount(**kind._asdict(), requests=requests) for kind, requests in counts.items()]


def _engine_report(pools: Pools, link: EngineLink) -> EngineReport:
    stats = link.stats
    transfer = stats.kv_transfer or KVTransferStats()
    held = stats.blocks_total - stats.blocks_free
    return EngineReport(
        engine_id=link.name,
        role=link.role,
        home=link.home,
        revision=link.revision,
        usable=pools.usable(link),
        listed=link.listed,
        draining=stats.draining,
        paused=stats.paused,
        verified=pools.verified(link),
        open_tokens=link.open_tokens,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_prompt_tokens=stats.queued_prompt_tokens,
        kv_usage=held / max(1, stats.blocks_total),
        leases_held=transfer.leases_held,
        blocks_held=transfer.blocks_held,
        loads_failed=transfer.loads_failed,
        leases_expired=transfer.leases_expired,
        stale_reads_refused=transfer.stale_reads_refused,
        prefix_fetches=transfer.prefix_fetches,
        prefix_fetches_failed=transfer.prefix_fetches_failed,
        prefix_tokens_fetched=transfer.prefix_tokens_fetched,
        silent=link.silent,
        breaker=link.breaker.state,
        kept_out=link.kept_out,
        node=link.location.node,
        zone=link.location.zone,
        failures={str(kind): count for kind, count in link.breaker.failures.items()},
    )
