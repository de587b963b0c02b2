"""Reads a multipart/form-data form piece by piece, without I/O.

The bytes of a file are passed on. The other fields, which are few and small, are kept.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from diptych_frontend.batches_api.api_types import FileForm
from diptych_frontend.openai.errors import from_decode_error
from diptych_protocol import InvalidRequestError

MAX_FILE_BYTES: Final = 200 << 20
MAX_FIELD_BYTES: Final = 1024
MAX_FIELDS: Final = 8
MAX_CONTENT_TYPE: Final = 4096
"""A longer type is read up to here: one as long as headers may be takes 9 ms."""
MAX_FILENAME: Final = 255


class UploadForm:
    """The form of one upload."""

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
            raise from_decode_error(exc) from exc
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
