"""Decides which requests of browsers are served, without I/O.

A browser sends requests to any address that its user can reach, for any site whose page the user
opens. So that site could act from the user's place in the network. Two headers, which no script can
set, show where a request comes from. `Host` is the name that led here, and `Sec-Fetch-Site` (or
`Origin`, where that is absent) says which site's page sent it. Other clients send neither
`Sec-Fetch-Site` nor `Origin`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

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
    """Further names of the server, in lower case. Names that no other site can have are always
    allowed."""
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
