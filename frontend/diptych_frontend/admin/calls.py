"""The admin port of our pods: a few routes as JSON, for whoever holds the service's admin token.

The token is a file of the service's Secret, which a rotation changes under the running process: so
it is read again for each request, and the previous one is good as long as the Secret has it.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.openai.asgi import BodyReader, Boundary
from diptych_frontend.openai.request_body import decode_json
from diptych_protocol import InvalidRequestError
from diptych_protocol.admin import ADMIN_TOKEN_FILE, PREVIOUS_ADMIN_TOKEN_FILE

T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20
"""The largest bodies are a hand-off's parameters, which list its blocks."""


def build_admin_app(keys_dir: Path, routes: Sequence[BaseRoute]) -> ASGIApp:
    """An app of these routes, none of them answered without the token in `keys_dir`.

    Errors have the form that the OpenAI API gives them.
    """
    router = Router(list(routes), redirect_slashes=False, default=_unknown_path)
    app: ASGIApp = BodyReader(router, MAX_BODY_BYTES)
    app = AdminToken(app, keys_dir)
    return Boundary(app, on_answer=_count_nothing, access_log="off")


def report(value: msgspec.Struct) -> Response:
    """A 200 with the struct as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def body_of(request: Request, kind: type[T]) -> T:
    """The request's JSON body; an empty one counts as an empty object.

    Raises `InvalidRequestError`, naming the field, unless it is a `kind`.
    """
    return decode_json(await request.body() or b"{}", msgspec.json.Decoder(kind))


def seconds_of(request: Request, name: str, default: float, most: float) -> float:
    """A query parameter in seconds. Raises `InvalidRequestError` unless it is in 0..`most`."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= most:
        raise InvalidRequestError(f"{name} must be a number of seconds in 0..{most:g}", param=name)
    return seconds


class AdminToken:
    """Lets nobody past without one of the Secret's tokens. No token there: nobody at all."""

    def __init__(self, app: ASGIApp, keys_dir: Path) -> None:
        self._app = app
        self._files = [keys_dir / name for name in (ADMIN_TOKEN_FILE, PREVIOUS_ADMIN_TOKEN_FILE)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        offered = Headers(scope=scope).get("authorization", "").encode("latin-1", "replace")
        if not any(hmac.compare_digest(offered, good) for good in self._credentials()):
            raise InvalidRequestError(
                "wrong or missing admin token; send it as 'Authorization: Bearer TOKEN'",
                status=401,
                code="invalid_admin_token",
            )
        await self._app(scope, receive, send)

    def _credentials(self) -> list[bytes]:
        tokens = []
        for file in self._files:
            try:
                tokens.append(file.read_bytes().strip())
            except OSError:
                continue  # no rotation is under way, or the Secret is being exchanged
        return [b"Bearer " + token for token in tokens if token]


def _count_nothing(route: str, status: int, tenant: str) -> None:
    """The admin port is not part of the server's metrics."""


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise InvalidRequestError(f"no such path: {scope['path'][:200]}", status=404, code="not_found")
