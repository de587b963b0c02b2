"""What the operator asks a router: `GET /admin/state`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from diptych_frontend.admin.calls import build_admin_app, report
from diptych_protocol.admin import RouterReport


def admin_app(state: Callable[[], Awaitable[RouterReport]], keys_dir: Path) -> ASGIApp:
    """The app of the admin port; `state` is asked for each report."""

    async def answer(request: Request) -> Response:
        return report(await state())

    return build_admin_app(keys_dir, [Route("/admin/state", answer)])
