"""POST /v1/files: writes a file to the disk while it arrives."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)
from starlette.requests import Request

from diptych_frontend.batches_api.api_types import KEPT_S, FileForm, FileObject
from diptych_frontend.batches_api.file_store import FileStore
from diptych_frontend.batches_api.folder import Disk, create, sync
from diptych_frontend.openai.asgi import BODY_TIMEOUT_S
from diptych_frontend.openai.errors import from_decode_error
from diptych_frontend.openai.exchange import Exchange, exchange_of
from diptych_protocol import EngineOverloadedError, InvalidRequestError

MAX_FILE_BYTES: Final = 200 << 20
MAX_FIELD_BYTES: Final = 1024
MAX_FIELDS: Final = 8
MAX_CONTENT_TYPE: Final = 4096
"""A longer type is read up to here: one as long as headers may be takes 9 ms."""
MAX_FILENAME: Final = 255


class UploadForm:
    """The form of one upload, which is read piece by piece. It performs no I/O.

    The bytes of a file are passed on. The other fields, which are few and small, are kept.
    """

    def __init__(self, content_type: str) -> None:
        """Raises `InvalidRequestError` for a body of another type."""
        kind, options = parse_options_header(content_type[:MAX_CONTENT_TYPE])
        boundary = options.get("boundary")
        if kind != "multipart/form-data" or not boundary:
            raise InvalidRequestError(
                "send the file as 'Content-Type: multipart/form-data', with a boundary",
                param="Content-Type",
                status=415,
            )
        try:
            self._parser = PushMultipartParser(
                boundary, max_segment_count=MAX_FIELDS, max_segment_size=MAX_FILE_BYTES, strict=True
            )
        except MultipartError as exc:
            raise InvalidRequestError(f"the boundary: {exc}", param="Content-Type") from exc
        self._segment: MultipartSegment | None = None
        self._value = bytearray()
        self._fields: dict[str, str] = {}

    def feed(self, piece: bytes) -> bytes:
        """Add the next bytes of the body, and return those that belong to the file.

        Raises `InvalidRequestError` for an invalid form, or one that is too large.
        """
        if self._parser.closed or not piece:
            return b""  # an epilogue says nothing
        of_file: list[bytes] = []
        try:
            for event in self._parser.parse(piece):
                if isinstance(event, MultipartSegment):
                    self._begin(event)
                elif event is None:
                    self._end()
                elif self._in_file:
                    of_file.append(event)
                else:
                    self._keep(event)
        except ParserLimitReached as exc:
            raise InvalidRequestError(
                f"the form is too large: {exc.args[0]}", status=413, code="body_too_large"
            ) from exc
        except MultipartError as exc:
            raise InvalidRequestError(f"the form cannot be read: {exc.args[0]}") from exc
        return b"".join(of_file)

    def ended(self) -> FileForm:
        """Return the fields after the body. Raises `InvalidRequestError`, naming the field."""
        try:
            self._parser.close()
        except MultipartError as exc:
            raise InvalidRequestError(f"the form ends too early: {exc}") from exc
        try:
            form = msgspec.convert(self._fields, FileForm, strict=False)
        except msgspec.ValidationError as exc:
            raise from_decode_error(exc, FileForm) from exc
        if (form.expires_after_anchor is None) != (form.expires_after_seconds is None):
            raise InvalidRequestError(
                "expires_after needs both anchor and seconds", param="expires_after"
            )
        return form

    @property
    def _in_file(self) -> bool:
        return self._segment is not None and self._segment.name == "file"

    def _begin(self, segment: MultipartSegment) -> None:
        name: Any = segment.name
        if name in self._fields:
            raise InvalidRequestError(f"{name[:100]} is there twice", param=name)
        self._segment = segment
        self._value.clear()

    def _keep(self, piece: bytes) -> None:
        self._value += piece
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"a field has more than {MAX_FIELD_BYTES} bytes", status=413, code="body_too_large"
            )

    def _end(self) -> None:
        segment = self._segment
        if segment is None:
            return
        if self._in_file:
            self._fields["file"] = (segment.filename or "file.jsonl")[:MAX_FILENAME]
        else:
            self._fields[segment.name or ""] = self._value.decode(errors="replace")
        self._segment = None


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
