"""The layer in front of all routes that admits browsers by `BrowserRules`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.browsers.rules import ASKS_HEADERS, ASKS_METHOD, READ, BrowserRules
from diptych_frontend.openai.errors import Headers
from diptych_frontend.openai.exchange import exchange_of

_READ: Final = frozenset(READ)
_VARIES: Final[Headers] = ((b"vary", b"origin"),)
METHODS: Final = b"GET, HEAD, POST, DELETE"
PREFLIGHT_AGE_S: Final = 600


class BrowserGate:
    """Stands between the `Boundary`, which answers errors, and the check of API keys, because
    browsers send no key in preflight requests."""

    def __init__(self, app: ASGIApp, rules: BrowserRules, *, any_host: bool = False) -> None:
        """any_host: accept any name of the server. Nothing behind it is open without a key, and a
        site that directs a browser here has none."""
        self._app = app
        self._rules = rules
        self._any_host = any_host

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # No coroutine of its own, which would be one more to wake for each token of an answer.
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        headers = {key: value for key, value in scope["headers"] if key in _READ}
        if not self._any_host:
            self._rules.check_host(scope["path"], headers)
        method = scope["method"]
        origin = self._rules.shared_with(method, headers)
        if self._rules.origins:
            exchange_of(scope).headers = _VARIES if origin is None else _shared(origin)
        if origin is not None and method == "OPTIONS" and ASKS_METHOD in headers:
            return _allow(headers.get(ASKS_HEADERS, b""), send)
        return self._app(scope, receive, send)


def _shared(origin: bytes) -> Headers:
    """What tells a browser that pages of this origin may read the answer, with all its headers.

    Credentials are not mentioned: nothing here is told by a cookie.
    """
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"*"),
        *_VARIES,
    )


async def _allow(asked_headers: bytes, send: Send) -> None:
    """Tell what the pages of an allowed origin may send: any header, since clients have many."""
    headers = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", asked_headers),
        (b"access-control-max-age", str(PREFLIGHT_AGE_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
