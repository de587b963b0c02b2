"""What a router's admin port answers: the operator's question, and those of users on requests."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from diptych_frontend.admin.calls import build_admin_app, report
from diptych_router.explaining.request_routes import request_routes
from diptych_router.pool_client import PoolClient
from diptych_router.report import router_report


def admin_app(client: PoolClient, keys_dir: Path) -> ASGIApp:
    """The app of the admin port. Engines are asked for each report of the router's state."""

    async def state(request: Request) -> Response:
        await client.refresh_stats()
        return report(router_report(client))

    requests = request_routes(client.explanations, client.name_of)
    return build_admin_app(keys_dir, [Route("/admin/state", state), *requests])
