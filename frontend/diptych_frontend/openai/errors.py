"""Turns every failure into an answer, in OpenAI's form (`{"error": {message, type, param, code}}`)
unless a route has a form of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException

from diptych_frontend.confined.json_cost import DearJsonError
from diptych_frontend.openai.field_rules import choices_at
from diptych_protocol import (
    ClientClosedError,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    InvalidRequestError,
    QuotaExceededError,
    TenantOverloadedError,
    UnsupportedFeatureError,
)

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
"""The most characters of a client's own text that an error quotes."""

Headers = tuple[tuple[bytes, bytes], ...]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error for the client: as an HTTP answer, or as an event of a stream that has begun."""

    status: int
    detail: ErrorDetail
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of an API's errors, and its name for the id of a request."""

    id_header: bytes
    body: Callable[[ErrorAnswer, str], bytes]
    """Makes the body of an answer; also gets the request's id."""
    event: Callable[[ErrorAnswer, str], bytes]
    """Makes the last event of a stream that has begun."""


def _openai_body(answer: ErrorAnswer, request_id: str) -> bytes:
    return msgspec.json.encode(ErrorBody(answer.detail))


def _openai_event(answer: ErrorAnswer, request_id: str) -> bytes:
    return b"data: " + _openai_body(answer, request_id) + b"\n\n"


OPENAI: Final = Dialect(b"x-request-id", _openai_body, _openai_event)


def error_answer(exc: BaseException, request_id: str) -> ErrorAnswer:
    """Return the answer to a request that failed with `exc`.

    Errors that this project raises on purpose contain their own message. Any other is a bug: its
    text is in the log only, and the client gets the id to find it by.
    """
    match exc:
        case InvalidRequestError():
            message = str(exc)[:MAX_MESSAGE_CHARS]
            param = exc.param and exc.param[:MAX_PARAM_CHARS]
            detail = ErrorDetail(message, "invalid_request_error", param, exc.code)
            return ErrorAnswer(exc.status, detail, _CHALLENGE if exc.status == 401 else ())
        case HTTPException():
            headers = tuple((k.encode(), v.encode()) for k, v in (exc.headers or {}).items())
            detail = ErrorDetail(str(exc.detail), "invalid_request_error")
            return ErrorAnswer(exc.status_code, detail, headers)
        case QuotaExceededError():
            headers = _retry_after(exc.retry_after_s) if exc.retry_after_s else ()
            return ErrorAnswer(429, ErrorDetail(str(exc), "tokens", None, exc.code), headers)
        case TenantOverloadedError():
            detail = ErrorDetail(str(exc), "requests", None, "rate_limit_exceeded")
            return ErrorAnswer(429, detail, _retry_after(exc.retry_after_s))
        case EngineOverloadedError():
            message = str(exc) or "the server is overloaded"
            return _unavailable(message, "overloaded", exc.retry_after_s)
        case ClientClosedError():
            return _unavailable(str(exc) or "the server is shutting down", "shutting_down")
        case UnsupportedFeatureError():
            return ErrorAnswer(501, ErrorDetail(str(exc), "server_error", None, "unsupported"))
        case EngineDeadError():
            return ErrorAnswer(500, ErrorDetail(str(exc), "server_error", None, "engine_dead"))
        case EngineGenerateError():
            return ErrorAnswer(500, ErrorDetail(str(exc), "server_error", None, "engine_error"))
    message = f"internal error; the server's log has it under request id {request_id}"
    return ErrorAnswer(500, ErrorDetail(message, "server_error", None, "internal_error"))


def _unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ErrorAnswer:
    detail = ErrorDetail(message, "server_error", None, code)
    return ErrorAnswer(503, detail, _retry_after(retry_after_s))


def _retry_after(seconds: int) -> Headers:
    return ((b"retry-after", str(seconds).encode()),)


_CHALLENGE = ((b"www-authenticate", b"Bearer"),)
"""RFC 9110 wants it with every 401."""
_AT_PATH = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_NAMED_FIELD = re.compile(
    r"^Object (?:contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL
)


def from_decode_error(exc: Exception, kind: Any) -> InvalidRequestError:
    """Return an error that says which field of a request body is wrong, and how, in the API's
    terms; and what a field may be that has only a few values.

    kind: the type of the body.

    `exc` is what msgspec raised: a ValidationError (types), a DecodeError (not JSON at all), a
    UnicodeDecodeError or a RecursionError.
    """
    if isinstance(exc, DearJsonError):
        return InvalidRequestError(f"the body has {exc}", status=413, code="body_too_large")
    if isinstance(exc, RecursionError):
        return InvalidRequestError("the body is nested too deeply")
    if not isinstance(exc, msgspec.ValidationError):
        return InvalidRequestError(f"the body is not valid JSON: {exc}", code="invalid_json")
    if isinstance(cause := exc.__cause__, InvalidRequestError):  # a type says it of its own field
        return InvalidRequestError(str(cause), param=cause.param)
    located = _AT_PATH.match(str(exc))
    problem, path = located.group("problem", "path") if located else (str(exc), None)
    named = _NAMED_FIELD.match(problem)
    if named and not path:
        field = named["field"]
        missing = problem.startswith("Object missing")
        sentence = f"missing required field: {field}" if missing else f"unknown field: {field}"
        return InvalidRequestError(sentence, param=field)
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {problem}")
    problem = problem[:1].lower() + problem[1:]
    if problem.startswith("invalid ") and (choices := choices_at(kind, path)):
        problem += f"; it may be {', '.join(choices)}"
    return InvalidRequestError(f"{path}: {problem}", param=re.split(r"[.\[]", path, maxsplit=1)[0])
