"""/v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from diptych_frontend.batches_api.api_types import BatchRequest, FileDeleted
from diptych_frontend.batches_api.service import BatchService
from diptych_frontend.openai.exchange import decode_body, decode_query, exchange_of
from diptych_frontend.openai.responses import json_response
from diptych_protocol import UnsupportedFeatureError

FILES_PATH: Final = "/v1/files"
READ_AT_ONCE: Final = 256 << 10


class FileQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query parameters of a list of files."""

    after: str | None = None
    limit: int = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class BatchQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query parameters of a list of batches."""

    after: str | None = None
    limit: int = 20


class BatchRoutes:
    """The endpoints."""

    def __init__(self, service: BatchService | None) -> None:
        """service: None for a server that keeps no files, and answers so."""
        self._service = service
        self._decoder = msgspec.json.Decoder(BatchRequest)

    def routes(self) -> list[Route]:
        """Return the routes, in the order of a reference."""
        return [
            Route(FILES_PATH, self.files, methods=["GET", "POST"]),
            Route(f"{FILES_PATH}/{{file_id}}", self.file, methods=["GET", "DELETE"]),
            Route(f"{FILES_PATH}/{{file_id}}/content", self.content),
            Route("/v1/batches", self.batches, methods=["GET", "POST"]),
            Route("/v1/batches/{batch_id}", self.batch),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    @property
    def _on(self) -> BatchService:
        if self._service is None:
            raise UnsupportedFeatureError(
                "this server keeps no files: its router has no batch directory "
                "(--batch-directory, or spec.router.batches)"
            )
        return self._service

    async def files(self, request: Request) -> Response:
        """Upload a file, or list the client's files."""
        service = self._on
        if request.method == "POST":
            return json_response(await service.uploads.take(request))
        query = decode_query(request.query_params, FileQuery, most=10_000)
        page = await service.disk.run(
            service.files.page,
            _client(request),
            after=query.after,
            limit=query.limit,
            newest_first=query.order == "desc",
            purpose=query.purpose,
        )
        return json_response(page)

    async def file(self, request: Request) -> Response:
        """Describe a file, or delete it."""
        service, file_id = self._on, request.path_params["file_id"]
        if request.method == "DELETE":
            await service.disk.run(service.store.delete_file, _client(request), file_id)
            return json_response(FileDeleted(file_id))
        return json_response(await service.disk.run(service.files.get, _client(request), file_id))

    async def content(self, request: Request) -> Response:
        """Return the bytes of a file."""
        service, file_id = self._on, request.path_params["file_id"]
        file, size = await service.disk.run(service.files.open_whole, _client(request), file_id)
        return StreamingResponse(
            _pieces(service, file),
            headers={"content-length": str(size), "x-content-type-options": "nosniff"},
            media_type="application/octet-stream",
        )

    async def batches(self, request: Request) -> Response:
        """Create a batch, or list the client's batches."""
        service, client = self._on, _client(request)
        if request.method == "POST":
            body = decode_body(request.scope, exchange_of(request.scope).body, self._decoder)
            made = await service.disk.run(service.store.create, client, body)
            service.look()
            return json_response(made)
        query = decode_query(request.query_params, BatchQuery, most=100)
        page = await service.disk.run(
            service.store.page, client, after=query.after, limit=query.limit
        )
        return json_response(page)

    async def batch(self, request: Request) -> Response:
        """Return a batch."""
        service, batch_id = self._on, request.path_params["batch_id"]
        return json_response(await service.disk.run(service.store.get, _client(request), batch_id))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; it keeps the answers that it has."""
        service, batch_id = self._on, request.path_params["batch_id"]
        batch = await service.disk.run(service.store.cancel, _client(request), batch_id)
        service.look()
        return json_response(batch)


async def _pieces(service: BatchService, file: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await service.disk.run(file.read, READ_AT_ONCE):
            yield piece
    finally:
        service.disk.close(file)


def _client(request: Request) -> str:
    return exchange_of(request.scope).tenant
