"""Adapters and new weights over HTTP, on the admin port of an engine pod.

    POST /admin/load_lora_adapter             {"lora_name": "sql", "lora_path": "/adapters/sql"}
    POST /admin/unload_lora_adapter           {"lora_name": "sql"}
    POST /admin/init_weight_transfer_engine   {"init_info": {…}}      where the trainer listens
    POST /admin/start_weight_update           {"is_checkpoint_format": true}
    POST /admin/update_weights                {"names": […], "update_info": {…}}
    POST /admin/finish_weight_update
    POST /admin/reload_weights                the model's own files again

An adapter's path is one in the engine's pod. Once it is loaded, API requests may use its name in
place of the model's. The bodies about weights only announce tensors: the process group of a trainer
in another pod carries them (`weights.trainer`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import body_of
from diptych_frontend.admin.control import refusable
from diptych_frontend.core_client.weights import CoreWeights
from diptych_frontend.openai.responses import json_response
from diptych_protocol import (
    InvalidRequestError,
    LoRARequest,
    UtilityError,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from diptych_protocol.control_calls import Done


class LoadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str


class UnloadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str


class AdapterReport(msgspec.Struct):
    """The adapters that requests may name now."""

    adapters: list[LoRARequest]


class Update(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    update_info: dict[str, Any]


class WeightRoutes:
    """Routes for `build_admin_app`."""

    def __init__(self, engine: CoreWeights) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        acts = (
            self.load_lora_adapter,
            self.unload_lora_adapter,
            refusable(self.init_weight_transfer_engine),
            refusable(self.update_weights),
        )
        return [Route(f"/admin/{act.__name__}", act, methods=["POST"]) for act in acts]

    async def load_lora_adapter(self, request: Request) -> Response:
        wanted = body_of(request, LoadAdapter)
        try:
            await self._engine.load_adapter(wanted.lora_name, wanted.lora_path)
        except UtilityError as exc:  # its files, or the lack of a place for it
            raise InvalidRequestError(str(exc), param="lora_path") from exc
        return self._adapters()

    async def unload_lora_adapter(self, request: Request) -> Response:
        await self._engine.unload_adapter(body_of(request, UnloadAdapter).lora_name)
        return self._adapters()

    def _adapters(self) -> Response:
        return json_response(AdapterReport(list(self._engine.adapters.values())))

    async def init_weight_transfer_engine(self, request: Request) -> Response:
        wanted = body_of(request, WeightTransferInitRequest)
        await self._engine.init_weight_transfer_engine(wanted)
        return json_response(Done())

    async def update_weights(self, request: Request) -> Response:
        wanted = body_of(request, Update)
        announced = WeightTransferUpdateRequest(wanted.names, update_info=wanted.update_info)
        await self._engine.update_weights(announced)
        return json_response(Done())
