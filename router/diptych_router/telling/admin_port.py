"""Answers a router's admin port: the operator's polls, and users' questions about requests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from diptych_frontend.admin.calls import build_admin_app, report
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_protocol import InvalidRequestError
from diptych_protocol.admin import Explanation
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.records import MOST_REQUESTS
from diptych_router.telling.explained import NameOf
from diptych_router.telling.explanations import Explanations
from diptych_router.telling.report import router_report

MOST_ID_CHARACTERS: Final = 256
DEFAULT_LIMIT: Final = 20


def request_routes(known: Explanations, name_of: NameOf) -> list[BaseRoute]:
    """Return the routes about requests, for the admin port.

    name_of: from an engine's key to its name.
    """

    async def newest(request: Request) -> Response:
        return report(known.newest(_limit_of(request)))

    async def why(request: Request) -> Response:
        return report(_explained(known, request.path_params["request_id"], name_of))

    return [
        Route("/admin/requests", newest),
        Route("/admin/requests/{request_id:path}/why", why),
    ]


def _explained(known: Explanations, request_id: str, name_of: NameOf) -> Explanation:
    """Raises `InvalidRequestError` for an id that cannot be one, or that is not remembered."""
    if len(request_id) > MOST_ID_CHARACTERS:
        raise InvalidRequestError(
            f"a request id has at most {MOST_ID_CHARACTERS} characters, this one has "
            f"{len(request_id)}",
            param="request_id",
        )
    found = known.explanation(request_id, name_of)
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
    client: PoolClient, explanations: Explanations, keys_dir: Path, api_keys: ApiKeys | None
) -> ASGIApp:
    """Return the app of the admin port. Each report of the router's state asks the engines."""

    async def state(request: Request) -> Response:
        await client.refresh_stats()
        return report(router_report(client, api_keys))

    requests = request_routes(explanations, client.name_of)
    return build_admin_app(keys_dir, [Route("/admin/state", state), *requests])
