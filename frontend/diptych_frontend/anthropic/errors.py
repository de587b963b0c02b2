"""Errors in the form of Anthropic's API: `{"type": "error", "error": {type, message}, ...}`."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from diptych_frontend.openai.errors import Dialect, ErrorAnswer
from diptych_frontend.openai.responses import encode

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Failure(msgspec.Struct):
    type: str
    message: str


class FailureBody(msgspec.Struct):
    error: Failure
    request_id: str
    type: Literal["error"] = "error"


def _body(answer: ErrorAnswer, request_id: str) -> bytes:
    default = "invalid_request_error" if answer.status < 500 else "api_error"
    failure = Failure(_TYPES.get(answer.status, default), answer.detail.message)
    return encode(FailureBody(failure, request_id))


def _event(answer: ErrorAnswer, request_id: str) -> bytes:
    return b"event: error\ndata: " + _body(answer, request_id) + b"\n\n"


ANTHROPIC: Final = Dialect(b"request-id", _body, _event)
