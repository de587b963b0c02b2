"""Checks the lines of an input file, each of which is a request for one of the routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import msgspec

from diptych_frontend.batches_api.api_types import BatchError
from diptych_protocol import UNREADABLE

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = (4 << 20) + 4096
"""Room for a body of the largest size and its surroundings."""
MAX_CUSTOM_ID: Final = 512
MAX_ERRORS: Final = 50
"""At most this many errors of a file are reported."""


class _Raw(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    stream: Any = None


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
        value = getattr(decoded, name)
        if value is None:
            message = f"missing required parameter: {name!r}"
            return BatchError("missing_required_parameter", message, name, number)
    if not isinstance(decoded.custom_id, str) or not 1 <= len(decoded.custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        return BatchError("invalid_custom_id", message, "custom_id", number)
    if decoded.method != "POST":
        return BatchError("invalid_method", "method must be POST", "method", number)
    if decoded.url != endpoint:
        message = f"url must be the batch's endpoint, {endpoint}"
        return BatchError("invalid_url", message, "url", number)
    body = bytes(decoded.body)
    if not body:
        message = "missing required parameter: 'body'"
        return BatchError("missing_required_parameter", message, "body", number)
    if not body.startswith(b"{"):
        return BatchError("invalid_body", "body must be a JSON object", "body", number)
    try:
        is_streamed = _BODY_DECODER.decode(body).stream
    except UNREADABLE as exc:  # the line's own decoder only skips over values of its body
        message = f"the body is not valid JSON: {exc}"
        return BatchError("invalid_body", message[:300], "body", number)
    if is_streamed:
        return BatchError("invalid_stream", "a batch is not streamed", "body.stream", number)
    return Line(number, decoded.custom_id, body)


def lines_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number. Of a line that is too long, only a part
    is yielded, and nothing after it."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
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
