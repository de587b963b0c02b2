"""The admin port of our pods: a few routes with JSON bodies, for holders of the admin token.

The token is a file of the service's Secret, which a rotation changes while the process runs. So it
is read again for each request, and the previous token is valid as long as the Secret has it.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.openai.asgi import BodyReader, Boundary, unknown_path
from diptych_frontend.openai.exchange import decode_json, exchange_of
from diptych_protocol import InvalidRequestError
from diptych_protocol.admin import ADMIN_TOKEN_FILE, PREVIOUS_ADMIN_TOKEN_FILE

T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20
"""The largest bodies are a hand-off's parameters, which list its blocks."""


def build_admin_app(keys_dir: Path, routes: Sequence[BaseRoute]) -> ASGIApp:
    """Return an app of these routes. None of them answers without the token in `keys_dir`.

    Errors have the form of the OpenAI API.
    """
    router = Router(list(routes), redirect_slashes=False, default=unknown_path)
    app: ASGIApp = BodyReader(router, MAX_BODY_BYTES)
    app = AdminToken(app, keys_dir)
    return Boundary(app, on_answer=_count_nothing)


def body_of(request: Request, kind: type[T]) -> T:
    """Return the request's JSON body. An empty one counts as an empty object.

    Raises `InvalidRequestError`, naming the field, unless it is a `kind`.
    """
    return decode_json(exchange_of(request.scope).body or b"{}", msgspec.json.Decoder(kind))


def seconds_of(request: Request, name: str, default: float, most: float) -> float:
    """Return a query parameter in seconds. Raises `InvalidRequestError` unless in 0..`most`."""
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
    """Refuses requests without one of the Secret's tokens, and all if there is none."""

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


def _count_nothing(route: str, status: int, tenant: str, ignored: int) -> None:
    """The admin port is not part of the server's metrics."""
