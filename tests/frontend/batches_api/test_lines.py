"""Which lines of an input file are requests, and what is said of the others."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest
from cases import each

from diptych_frontend.batches_api import lines
from diptych_frontend.batches_api.api_types import BatchError
from diptych_frontend.batches_api.lines import Line, check, lines_of, read_line

CHAT = "/v1/chat/completions"


def written(**changes: Any) -> bytes:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in line.items() if value is not None}).encode()


def test_a_sound_line_is_a_request_with_the_body_as_it_was_sent() -> None:
    assert read_line(3, written(), CHAT) == Line(3, "a", b'{"model": "m"}')


@each(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (written().replace(b'"a"', b'"\xff"'), "invalid_custom_id", "custom_id"),
        (written(custom_id=None), "missing_required_parameter", "custom_id"),
        (written(method=None), "missing_required_parameter", "method"),
        (written(url=None), "missing_required_parameter", "url"),
        (written(body=None), "missing_required_parameter", "body"),
        (written(custom_id=7), "invalid_custom_id", "custom_id"),
        (written(custom_id=""), "invalid_custom_id", "custom_id"),
        (written(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (written(method="GET"), "invalid_method", "method"),
        (written(url="/v1/completions"), "invalid_url", "url"),
        (written(url="http://127.0.0.1/"), "invalid_url", "url"),
        (written(body="hi"), "invalid_body", "body"),
        (written(body={"stream": True}), "invalid_stream", "body.stream"),
        (written().replace(b'"m"}', b'"m", "stream": 1e99999}'), "invalid_stream", "body.stream"),
        (written().replace(b'"m"}', b'"m", "stream": "\xff"}'), "invalid_stream", "body.stream"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_its_number(
    line: bytes, code: str, param: str | None
) -> None:
    checked = check(io.BytesIO(b"\n" + line + b"\n"), CHAT)
    [error] = checked.errors
    assert (error.code, error.param, error.line) == (code, param, 2)
    assert error.message


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "stream"])
def test_no_value_is_decoded_that_cannot_be_right(name: str) -> None:
    dear: list[list[int]] = [[]] * 200_000
    line = written(body={"stream": dear}) if name == "stream" else written(**{name: dear})
    read_line(1, line, CHAT)
    tracemalloc.start()
    try:
        assert isinstance(read_line(1, line, CHAT), BatchError)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * len(line)


def test_custom_ids_differ() -> None:
    file = io.BytesIO(b"\n".join((written(), written(custom_id="b"), written())))
    [error] = check(file, CHAT).errors
    assert (error.code, error.line) == ("duplicate_custom_id", 3)


def test_a_file_without_requests_is_no_batch() -> None:
    [error] = check(io.BytesIO(b"\n \n"), CHAT).errors
    assert (error.code, error.line) == ("empty_file", None)


def test_blank_lines_count_as_lines_but_not_as_requests() -> None:
    checked = check(io.BytesIO(b"\n" + written() + b"\r\n\n" + written(custom_id="b")), CHAT)
    assert (checked.total, checked.errors) == (2, [])


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    """As some editors write it."""
    checked = check(io.BytesIO(b"\xef\xbb\xbf" + written()), CHAT)
    assert (checked.total, checked.errors) == (1, [])


def test_errors_and_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(check(io.BytesIO(b"x\n" * 1000), CHAT).errors) == lines.MAX_ERRORS
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    three = b"\n".join(written(custom_id=name) for name in "abc")
    [error] = check(io.BytesIO(three), CHAT).errors
    assert (error.code, error.line) == ("too_many_requests", 3)


def test_a_line_without_an_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    file = io.BytesIO(b"x" * 1000 + b"\n" + written())
    read = list(lines_of(file))
    assert [(number, len(raw)) for number, raw in read] == [(1, 101)]
    file.seek(0)
    [error] = check(file, CHAT).errors
    assert error.code == "line_too_large"
