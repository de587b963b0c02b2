"""Receives new weights over HTTP, on the admin port of an engine pod, from a trainer in another
pod.

    POST /admin/init_weight_transfer_engine   {"init_info": {…}}      where the trainer listens
    POST /admin/start_weight_update           {"is_checkpoint_format": true}
    POST /admin/update_weights                {"names": […], "update_info": {…}}
    POST /admin/finish_weight_update
    POST /admin/reload_weights                the model's own files again

The bodies only announce tensors; the trainer's process group carries them (`weights.trainer`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import body_of, report
from diptych_frontend.admin.control import refusable
from diptych_frontend.core_client.weights import CoreWeights
from diptych_protocol import WeightTransferInitRequest, WeightTransferUpdateRequest
from diptych_protocol.control_calls import Done


class Update(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    update_info: dict[str, Any]


class WeightRoutes:
    """Routes for `build_admin_app`."""

    def __init__(self, engine: CoreWeights) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        acts = (
            self.init_weight_transfer_engine, self.update_weights,
        )  # fmt: skip
        return [Route(f"/admin/{a.__name__}", refusable(a), methods=["POST"]) for a in acts]

    async def init_weight_transfer_engine(self, request: Request) -> Response:
        wanted = body_of(request, WeightTransferInitRequest)
        await self._engine.init_weight_transfer_engine(wanted)
        return report(Done())

    async def update_weights(self, request: Request) -> Response:
        wanted = body_of(request, Update)
        announced = WeightTransferUpdateRequest(wanted.names, update_info=wanted.update_info)
        await self._engine.update_weights(announced)
        return report(Done())
