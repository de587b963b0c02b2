"""The control calls over HTTP, and adapters and new weights, on the admin port of an engine pod.

Bodies are JSON objects. Each field of a control call may be left out, and so may the body. An
answer comes when the call is done. A call that the engine's present state does not allow gets 409.

An adapter's path is one in the engine's pod. Once it is loaded, API requests may use its name in
place of the model's. The bodies about weights only announce tensors: the process group of a trainer
in another pod carries them (`weights.trainer`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import body_of
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.weights import CoreWeights
from diptych_frontend.openai.responses import json_response
from diptych_protocol import (
    InvalidRequestError,
    LoRARequest,
    UtilityError,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from diptych_protocol.control_calls import CONTROL_CALLS, ControlCall, Done

Handler = Callable[[Request], Awaitable[Response]]


MAX_DRAIN_S: Final = 86400


class RejectKVTransfer(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str
    kv_transfer_params: dict[str, Any]


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    new_data_parallel_size: int
    drain_timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)] = 300.0
    """Seconds within which the requests of a removed core may end there."""


class ScaleReport(msgspec.Struct, frozen=True):
    data_parallel_size: int


class ControlReport(msgspec.Struct, frozen=True):
    """Whether the engine works."""

    is_paused: bool
    is_sleeping: bool
    sleep_level: int
    """0: everything is in memory; 1: the weights are in host memory; 2: they are dropped."""


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


class ControlRoutes:
    """Routes for `build_admin_app`."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        reject = refusable(self.reject_kv_transfer)
        return [
            *(self._route(kind) for kind in CONTROL_CALLS if kind.PATH),
            Route("/admin/reject_kv_transfer", reject, methods=["POST"]),
            Route("/admin/scale_elastic_ep", self.scale_elastic_ep, methods=["POST"]),
        ]

    def _route(self, kind: type[ControlCall[Any]]) -> Route:
        async def act(request: Request) -> Response:
            call = body_of(request, kind)
            answer = await self._engine.control(call)
            shown = call.report(answer)
            return await self._state(request) if shown is None else json_response(shown)

        if kind.READS:
            return Route(f"/admin/{kind.PATH}", self._state)
        return Route(f"/admin/{kind.PATH}", refusable(act), methods=["POST"])

    async def _state(self, request: Request) -> Response:
        stats = await self._engine.refresh_stats()
        asleep = stats.paused or stats.sleep_level > 0
        return json_response(ControlReport(stats.paused, asleep, stats.sleep_level))

    async def reject_kv_transfer(self, request: Request) -> Response:
        """Free what is held for a request that somebody refused before admission."""
        refused = body_of(request, RejectKVTransfer)
        await self._engine.reject_kv_transfer(refused.request_id, refused.kv_transfer_params)
        return json_response(Done())

    async def scale_elastic_ep(self, request: Request) -> Response:
        """Change the number of cores, and answer when all of them serve."""
        wanted = body_of(request, Scale)
        await self._engine.scale_elastic_ep(wanted.new_data_parallel_size, wanted.drain_timeout)
        return json_response(ScaleReport(len(self._engine.stats_by_engine())))


def refusable(act: Handler) -> Handler:
    """Turn the engine's refusal into an error of the field that it names; without one into a
    conflict, since the call may succeed in another state."""

    @wraps(act)
    async def handler(request: Request) -> Response:
        try:
            return await act(request)
        except UtilityError as exc:
            status, code = (400, None) if exc.param else (409, "refused")
            raise InvalidRequestError(str(exc), param=exc.param, status=status, code=code) from exc

    return handler


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
