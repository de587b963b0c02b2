"""Reads parts of files over HTTP, with deadlines and errors that contain no secret: for the Hub,
and of https://HOST/FILE.gguf, on any server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx2

from diptych_frontend.model_files.fetch.source import (
    CREDENTIALS,
    URI,
    BadSourceError,
    ChangedError,
    Credentials,
    FetchError,
    RemoteFile,
    UnreachableError,
)
from diptych_protocol.model_uri import ModelUri, parts_of

CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 30.0
"""The longest time without a byte."""
PART_TIMEOUT_S: Final = 300.0
"""The time limit of a part. A slower source counts as dead."""
MAX_RETRY_AFTER_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Head:
    """A file's description in HTTP headers."""

    size: int
    version: str
    """Entity tag, else the time of the last change, else empty."""


class HttpRanges:
    """A client of one origin, which alone gets the token: no server that it redirects to."""

    def __init__(self, token: str = "") -> None:
        self._own = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx2.Client(
            follow_redirects=True,
            headers={"accept-encoding": "identity", "user-agent": "diptych"},
            timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )
        # A hub answers with a signed link to a file server. Asking it again for each part would
        # double the requests and soon meet its rate limit.
        self._links: dict[str, str] = {}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def head(self, url: str) -> Head:
        """Return size and version of a file. Raises as `Source.files`."""
        with _mapped_errors(url):
            response = self._client.head(url, headers=self._own)
        _check(response, url)
        length = response.headers.get("content-length", "")
        if not length.isdecimal():
            raise BadSourceError(URI, f"{_origin(url)} does not say how long the file is")
        return Head(int(length), _version(response))

    def read(self, url: str, start: int, end: int, version: str = "") -> bytes:
        """Return the bytes from `start` up to `end`; of `version`, if one is given."""
        link = self._links.get(url)
        if link is not None:
            try:
                return self._read(link, {}, url, start, end, version)
            except BadSourceError:
                self._links.pop(url, None)
        return self._read(url, self._own, url, start, end, version)

    def _read(
        self, target: str, headers: dict[str, str], url: str, start: int, end: int, version: str
    ) -> bytes:
        headers = headers | {"range": f"bytes={start}-{end - 1}"}
        with _mapped_errors(url), self._client.stream("GET", target, headers=headers) as response:
            _check(response, url)
            if version and _version(response) != version:
                raise ChangedError(f"{_origin(url)} has another version of the file than before")
            if response.history and _origin(str(response.url)) != _origin(url):
                self._links[url] = str(response.url)
            if start > 0 and response.status_code != httpx2.codes.PARTIAL_CONTENT:
                # It sends the file from its begin: for each part, all that was before.
                raise BadSourceError(
                    URI, f"{_origin(url)} sends no parts of files; use a server that does"
                )
            return _take(response, end - start, url)


def _take(response: httpx2.Response, wanted: int, url: str) -> bytes:
    deadline = time.monotonic() + PART_TIMEOUT_S
    part = bytearray()
    for chunk in response.iter_raw():
        part += chunk
        if len(part) >= wanted:
            return bytes(part[:wanted])
        if time.monotonic() > deadline:
            raise UnreachableError(f"{_origin(url)} sends too slowly")
    raise UnreachableError(f"{_origin(url)} broke off")


def _check(response: httpx2.Response, url: str) -> None:
    if not response.is_success:
        raise refusal(response, _origin(url))


def refusal(response: httpx2.Response, where: str) -> FetchError:
    """Explain why a server refuses; `where` names the server."""
    status = response.status_code
    if status in (401, 403):
        return BadSourceError(
            CREDENTIALS, f"{where} refuses access ({status}); give a token that may read the model"
        )
    if status in (404, 410):
        return BadSourceError(URI, f"{where} has no such file ({status}); check the URI")
    if status == httpx2.codes.TOO_MANY_REQUESTS or status >= 500:
        return UnreachableError(f"{where} answers {status}", _retry_after(response))
    return FetchError(f"{where} answers {status}, which makes no sense here")


def _retry_after(response: httpx2.Response) -> float:
    """Seconds that a server asks to be left alone, within reason."""
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdecimal() else 0.0


def _version(response: httpx2.Response) -> str:
    headers = response.headers
    return headers.get("etag") or headers.get("last-modified") or ""


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


@contextmanager
def _mapped_errors(url: str) -> Iterator[None]:
    """Turn the client's errors into ours; theirs may show a signed link."""
    try:
        yield
    except httpx2.TransportError as exc:
        cause = type(exc).__name__
        raise UnreachableError(f"{_origin(url)} cannot be reached ({cause})") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as exc:
        raise FetchError(f"{_origin(url)}: {type(exc).__name__}") from None


class WebSource:
    """See `Source`: a file of a web server, which gives no checksum; only the service can specify
    one."""

    def __init__(self, uri: ModelUri, credentials: Credentials) -> None:
        self._uri = uri
        self._ranges = HttpRanges(credentials.token)

    def files(self) -> Sequence[RemoteFile]:
        """Returns the file, or all those that the model is split into. A file's version is the
        server's entity tag."""
        return [self._remote_file(name) for name in parts_of(self._uri.path)]

    def _remote_file(self, name: str) -> RemoteFile:
        url = self._uri.text.removesuffix(self._uri.path) + name
        head = self._ranges.head(url)
        version = head.version or f"of {head.size} bytes"
        return RemoteFile(name, head.size, version, url)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        version = "" if file.version.startswith("of ") else file.version
        return self._ranges.read(file.locator, start, end, version)

    def close(self) -> None:
        self._ranges.close()
