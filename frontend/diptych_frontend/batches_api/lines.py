"""Checks the lines of an input file, each of which is a request for one of the routes."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec

from diptych_frontend.batches_api.api_types import BatchError
from diptych_protocol import UNREADABLE

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = (4 << 20) + 4096
"""Room for a body of the largest size and its surroundings."""
MAX_CUSTOM_ID: Final = 512
MAX_CHAR_BYTES: Final = 12
"""A character beyond 16 bits has so many bytes as two escapes."""
MAX_ERRORS: Final = 50
"""At most this many errors of a file are reported."""


ABSENT: Final = (b"", b"null")


class _Raw(msgspec.Struct):
    """What a line may say, undecoded: a value of 4 MiB is much work."""

    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw()


_DECODER: Final = msgspec.json.Decoder(_Raw)
_BODY_DECODER: Final = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Line:
    """A valid line. The route checks its body."""

    number: int
    custom_id: str
    body: bytes


@dataclass(slots=True)
class Checked:
    """The result of checking an input file."""

    total: int = 0
    errors: list[BatchError] = field(default_factory=list)


def read_line(number: int, raw: bytes, endpoint: str) -> Line | BatchError:
    """Parse one line, which is not blank, or return what is wrong with it."""
    if len(raw) >= MAX_LINE_BYTES:
        message = f"the line has {MAX_LINE_BYTES} bytes or more"
        return BatchError("line_too_large", message, None, number)
    try:
        decoded = _DECODER.decode(raw)
    except UNREADABLE as exc:
        message = f"this line is not valid JSON, or not an object: {exc}"
        return BatchError("invalid_json_line", message[:300], None, number)
    for name in ("custom_id", "method", "url"):
        if bytes(getattr(decoded, name)) in ABSENT:
            message = f"missing required parameter: {name!r}"
            return BatchError("missing_required_parameter", message, name, number)
    custom_id = _short_text(decoded.custom_id)
    if not custom_id:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        return BatchError("invalid_custom_id", message, "custom_id", number)
    if _short_text(decoded.method) != "POST":
        return BatchError("invalid_method", "method must be POST", "method", number)
    if _short_text(decoded.url) != endpoint:
        message = f"url must be the batch's endpoint, {endpoint}"
        return BatchError("invalid_url", message, "url", number)
    body = bytes(decoded.body)
    if not body:
        message = "missing required parameter: 'body'"
        return BatchError("missing_required_parameter", message, "body", number)
    if not body.startswith(b"{"):
        return BatchError("invalid_body", "body must be a JSON object", "body", number)
    try:
        streamed = bytes(_BODY_DECODER.decode(body).stream)
    except UNREADABLE as exc:  # the line's own decoder only skips over values of its body
        message = f"the body is not valid JSON: {exc}"
        return BatchError("invalid_body", message[:300], "body", number)
    if streamed not in (*ABSENT, b"false"):
        return BatchError("invalid_stream", "a batch is not streamed", "body.stream", number)
    return Line(number, custom_id, body)


def _short_text(value: msgspec.Raw) -> str | None:
    """A text of at most `MAX_CUSTOM_ID` characters; None for any other value."""
    if len(bytes(value)) > MAX_CUSTOM_ID * MAX_CHAR_BYTES:
        return None
    try:
        text = msgspec.json.decode(value, type=str)
    except UNREADABLE:
        return None
    return text if len(text) <= MAX_CUSTOM_ID else None


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number. Of a line that is too long, only a part
    is yielded, and nothing after it. A byte order mark at the beginning is left out."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            raw = raw.removeprefix(BOM_UTF8)
        if stripped := raw.strip():
            yield number, stripped
        if len(raw) > MAX_LINE_BYTES:
            return


def check(file: BinaryIO, endpoint: str) -> Checked:
    """Check a whole file. Its custom ids must differ from each other."""
    checked = Checked()
    seen: set[str] = set()
    for number, raw in lines_of(file):
        checked.total += 1
        if checked.total > MAX_LINES:
            message = f"a batch has at most {MAX_LINES} requests"
            checked.errors.append(BatchError("too_many_requests", message, None, number))
            return checked
        line = read_line(number, raw, endpoint)
        if isinstance(line, Line) and line.custom_id in seen:
            message = f"the custom_id {line.custom_id[:100]!r} is on an earlier line, too"
            line = BatchError("duplicate_custom_id", message, "custom_id", number)
        if isinstance(line, Line):
            seen.add(line.custom_id)
            continue
        checked.errors.append(line)
        if len(checked.errors) >= MAX_ERRORS:
            return checked
    if not checked.total:
        checked.errors.append(BatchError("empty_file", "the input file has no requests"))
    return checked
