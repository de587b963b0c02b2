"""The files of the page, read once, and the security headers for browsers.

Anybody who reaches the port gets them without a key, because a browser sends none when it opens an
address, and nothing in them is secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"
PREFIX: Final = "/ui/"
"""The prefix of the paths of every file but the page itself."""
TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def content_policy(connect_to: str = "") -> str:
    """Return what the page may load and call: its own server and, if given, the origin
    `connect_to`. Scripts and styles inside HTML are refused."""
    own = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": f"'self' {connect_to}".strip(),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in own.items())


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    content_type: str
    tag: str
    """Changes with the content; browsers ask whether their copy is still current."""


class Assets:
    """All files of the page, by their paths."""

    def __init__(self, connect_to: str = "") -> None:
        """`connect_to`: see `content_policy`."""
        files = (file for file in sorted(FOLDER.rglob("*")) if file.suffix in TYPES)
        self.by_path = {_path_of(file): _read(file) for file in files}
        self._headers = {
            "content-security-policy": content_policy(connect_to),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache",
        }

    async def answer(self, request: Request) -> Response:
        """Return the file at the request's path, or 304 if the browser has it already."""
        asset = self.by_path[request.url.path]
        headers = {**self._headers, "etag": asset.tag}
        if asset.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        headers["content-type"] = asset.content_type
        return Response(asset.content, headers=headers)


def _path_of(file: Path) -> str:
    return "/" if file.name == INDEX else PREFIX + file.relative_to(FOLDER).as_posix()


def _read(file: Path) -> Asset:
    content = file.read_bytes()
    digest = hashlib.blake2b(content, digest_size=12).hexdigest()
    return Asset(content, TYPES[file.suffix], f'"{digest}"')
