"""POST /v1/files: writes a file to the disk while it arrives."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final

from starlette.requests import Request

from diptych_frontend.batches_api.api_types import KEPT_S, FileForm, FileObject
from diptych_frontend.batches_api.disk import Disk
from diptych_frontend.batches_api.file_store import FileStore
from diptych_frontend.batches_api.folder import create, sync
from diptych_frontend.batches_api.form import MAX_FILE_BYTES, UploadForm
from diptych_frontend.openai.asgi import BODY_TIMEOUT_S
from diptych_frontend.openai.exchange import Exchange, exchange_of
from diptych_protocol import EngineOverloadedError, InvalidRequestError

MAX_FORM_BYTES: Final = MAX_FILE_BYTES + (64 << 10)
WRITTEN_AT_ONCE: Final = 1 << 20
UNCHECKED_SHARE: Final = 8
MAX_UNCHECKED_BYTES: Final = 16 << 20
"""Before a file has taken an eighth of the room, or so much, the room is looked at again: what
sizes clients declare says nothing, and others send files too."""
UPLOAD_TIMEOUT_S: Final = 900.0
MAX_UPLOADS: Final = 4
"""The most uploads of a client to a process at the same time."""


class Uploads:
    """Stores uploaded forms with files."""

    def __init__(self, files: FileStore, disk: Disk) -> None:
        self._files = files
        self._disk = disk
        self._open = Counter[str]()

    async def take(self, request: Request) -> FileObject:
        """Store the file of a form. Raises `InvalidRequestError`, naming the field."""
        exchange = exchange_of(request.scope)
        client = exchange.tenant
        form = UploadForm(request.headers.get("content-type", ""))
        declared = request.headers.get("content-length", "0")
        size = int(declared[:20]) if declared.isdecimal() else 0
        if size > MAX_FORM_BYTES:
            raise _too_large()
        if self._open[client] >= MAX_UPLOADS:
            raise EngineOverloadedError(f"{MAX_UPLOADS} files are being sent already; retry later")
        self._open[client] += 1
        try:
            content = await self._disk.run(self._files.begin, client, size)
            return await self._store(request, exchange, form, content)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    async def _store(
        self, request: Request, exchange: Exchange, form: UploadForm, content: Path
    ) -> FileObject:
        try:
            await self._receive(request, exchange, form, content)
            described = partial(_described, form.ended())
            await self._disk.run(self._files.check_room, exchange.tenant, 0)
            return await self._disk.run(self._files.add, content, described)
        except BaseException:
            with contextlib.suppress(OSError):
                content.unlink()
            raise

    async def _receive(
        self, request: Request, exchange: Exchange, form: UploadForm, content: Path
    ) -> None:
        ends_at = time.monotonic() + UPLOAD_TIMEOUT_S
        received, more = 0, True
        unchecked = may_take = 0
        pieces = bytearray()
        file = await self._disk.run(create, content)
        try:
            while more:
                try:
                    message = await exchange.deadline.within(BODY_TIMEOUT_S, request.receive())
                except TimeoutError:
                    raise _too_late() from None
                if message["type"] == "http.disconnect":
                    raise InvalidRequestError("the client left before the end of the file")
                received += len(message.get("body", b""))
                if received > MAX_FORM_BYTES:
                    raise _too_large()
                if time.monotonic() > ends_at:
                    raise _too_late()
                pieces += form.feed(message.get("body", b""))
                more = message.get("more_body", False)
                if len(pieces) >= WRITTEN_AT_ONCE or not more:
                    await self._disk.run(file.write, bytes(pieces))
                    unchecked += len(pieces)
                    pieces.clear()
                if unchecked > may_take:
                    room = await self._disk.run(self._files.check_room, exchange.tenant, 0)
                    unchecked, may_take = 0, min(room // UNCHECKED_SHARE, MAX_UNCHECKED_BYTES)
            await self._disk.run(sync, file)
        finally:
            self._disk.close(file)


def _described(form: FileForm, file_id: str, size: int) -> FileObject:
    now = int(time.time())
    return FileObject(
        id=file_id,
        bytes=size,
        created_at=now,
        expires_at=now + (form.expires_after_seconds or KEPT_S),
        filename=form.file,
        purpose=form.purpose,
    )


def _too_large() -> InvalidRequestError:
    return InvalidRequestError(
        f"a file has at most {MAX_FILE_BYTES} bytes", status=413, code="body_too_large"
    )


def _too_late() -> InvalidRequestError:
    return InvalidRequestError("the file did not arrive in time", status=408)
