"""Changes the number of engine cores over HTTP, on the admin port of an engine pod."""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import body_of, report
from diptych_frontend.core_client.async_llm import AsyncLLM

MAX_DRAIN_S = 86400


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    new_data_parallel_size: int
    drain_timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)] = 300.0
    """Seconds within which the requests of a removed core may end there."""


class ScaleReport(msgspec.Struct, frozen=True):
    data_parallel_size: int


class ScaleRoutes:
    """Routes for `build_admin_app`."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        return [Route("/admin/scale_elastic_ep", self.scale_elastic_ep, methods=["POST"])]

    async def scale_elastic_ep(self, request: Request) -> Response:
        """Change the number of cores, and answer when all of them serve."""
        wanted = body_of(request, Scale)
        await self._engine.scale_elastic_ep(wanted.new_data_parallel_size, wanted.drain_timeout)
        return report(ScaleReport(len(self._engine.stats_by_engine())))
