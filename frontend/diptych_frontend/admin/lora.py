"""Adapters by HTTP, on the admin port of an engine pod.

    POST /admin/load_lora_adapter     {"lora_name": "sql", "lora_path": "/adapters/sql"}
    POST /admin/unload_lora_adapter   {"lora_name": "sql"}

The path is one in the engine's pod. After that, API requests may use the name in place of the
model's.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import body_of, report
from diptych_frontend.core_client.weights import CoreWeights
from diptych_protocol import InvalidRequestError, LoRARequest, UtilityError


class LoadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str


class UnloadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str


class AdapterReport(msgspec.Struct):
    """The adapters that requests may name now."""

    adapters: list[LoRARequest]


class LoraRoutes:
    """Routes for `build_admin_app`."""

    def __init__(self, engine: CoreWeights) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        return [
            Route("/admin/load_lora_adapter", self.load, methods=["POST"]),
            Route("/admin/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        wanted = body_of(request, LoadAdapter)
        try:
            await self._engine.load_adapter(wanted.lora_name, wanted.lora_path)
        except UtilityError as exc:  # its files, or the lack of a place for it
            raise InvalidRequestError(str(exc), param="lora_path") from exc
        return self._report()

    async def unload(self, request: Request) -> Response:
        await self._engine.unload_adapter((body_of(request, UnloadAdapter)).lora_name)
        return self._report()

    def _report(self) -> Response:
        return report(AdapterReport(list(self._engine.adapters.values())))
