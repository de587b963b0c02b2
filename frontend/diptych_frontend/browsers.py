"""What the pages of other sites may ask of a server: rules without I/O, and the layer in front of
all routes that applies them.

A browser sends requests to any address that its user can reach, for any site whose page the user
opens. So that site could act from the user's place in the network. Two headers, which no script can
set, show where a request comes from. `Host` is the name that led here, and `Sec-Fetch-Site` (or
`Origin`, where that is absent) says which site's page sent it. Other clients send neither
`Sec-Fetch-Site` nor `Origin`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.openai.errors import Headers
from diptych_frontend.openai.exchange import exchange_of
from diptych_protocol import InvalidRequestError

HOST, ORIGIN, SITE, MODE, DESTINATION, ASKS_METHOD, ASKS_HEADERS = READ = (
    b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest",
    b"access-control-request-method", b"access-control-request-headers",
)  # fmt: skip
"""The headers that the rules read."""
PROBES: Final = frozenset({"/health", "/live", "/ping"})
"""Load balancers use these paths under any name. Their answers contain nothing secret."""
NOBODYS: Final = (".localhost", ".svc", ".svc.cluster.local")
"""Endings of names that nobody can register."""
MAX_HOST: Final = len("65535:") + 253
MAX_QUOTED: Final = 100
OWN: Final = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site` for the server's own pages, and for users who typed the address."""

HeaderValues = Mapping[bytes, bytes]
"""The headers of `READ` that a request has."""


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """What the owner of a server allows beyond what is harmless."""

    hosts: frozenset[str] = frozenset()
    """Further names of the server, in lower case. Those that no site can have are allowed."""
    origins: frozenset[str] = frozenset()
    """Origins of sites whose pages may use the API, in lower case."""

    def check_host(self, path: str, headers: HeaderValues) -> None:
        """Raise `InvalidRequestError` for a name that may be another site's. Clients other than
        browsers may omit it."""
        host = headers.get(HOST)
        if not host or path in PROBES or self._is_own(host):
            return
        raise InvalidRequestError(
            f"Host: this server is not known to be called {_quoted(host)!r}, and a web site could "
            "have led a browser here under a name of its own. Use the server's address, or allow "
            "the name: spec.router.allowedHosts of the service, or diptych up --allow-host NAME. "
            "A service with API keys answers under every name.",
            param="Host",
            status=421,
            code="unknown_host",
        )

    def shared_with(self, method: str, headers: HeaderValues) -> bytes | None:
        """Return the origin whose pages may read the answer; None: only the server's own pages.

        Raises `InvalidRequestError` for a request from another site's page.
        """
        origin, site = headers.get(ORIGIN), headers.get(SITE)
        is_own = site in OWN if site is not None else _is_at(origin, headers.get(HOST, b""))
        if is_own:
            return None
        if origin is not None and origin.decode("latin-1").lower() in self.origins:
            return origin
        if _follows_a_link(method, headers):
            return None
        raise InvalidRequestError(
            f"Origin: pages of other sites ({_quoted(origin or b'unnamed')}) may not use this "
            "server. To let them, allow their origin: spec.router.allowedOrigins of the service, "
            "or diptych up --allow-origin ORIGIN.",
            param="Origin",
            status=403,
            code="cross_site_request",
        )

    def _is_own(self, host: bytes) -> bool:
        if len(host) > MAX_HOST:
            return False
        name = _name_in(host)
        return name in self.hosts or _is_nobodys(name)


def _quoted(value: bytes) -> str:
    return value[:MAX_QUOTED].decode("latin-1")


@lru_cache(256)
def _name_in(host: bytes) -> str:
    """Without port, brackets, and the dot of a name that is written in full."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


@lru_cache(256)
def _is_nobodys(name: str) -> bool:
    """No site can have this name: it is an address, has no domain, or one that is not given out."""
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(NOBODYS)
    return True


def _is_at(origin: bytes | None, host: bytes) -> bool:
    """A page of this origin is the server's own, or there is no page."""
    # A proxy may have taken TLS off, so the scheme says nothing.
    return origin is None or origin.partition(b"://")[2].lower() == host.lower()


def _follows_a_link(method: str, headers: HeaderValues) -> bool:
    """A user comes from another site's page, which gets nothing of the answer."""
    reads = method in ("GET", "HEAD")
    return reads and (headers.get(MODE), headers.get(DESTINATION)) == (b"navigate", b"document")


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
        read = [(key, value) for key, value in scope["headers"] if key in _READ]
        headers = dict(read)
        if len(headers) < len(read):
            raise InvalidRequestError("Host, Origin and their like may be sent once", param="Host")
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
