"""https://HOST/FILE.gguf: one file of any web server."""

from __future__ import annotations

from collections.abc import Sequence

from diptych_frontend.model_files.fetch.credentials import Credentials
from diptych_frontend.model_files.fetch.http_ranges import HttpRanges
from diptych_frontend.model_files.fetch.source import RemoteFile
from diptych_protocol.model_uri import ModelUri, parts_of


class WebSource:
    """A file of a web server, which gives no checksum; only the service can specify one."""

    def __init__(self, uri: ModelUri, credentials: Credentials) -> None:
        self._uri = uri
        self._ranges = HttpRanges(credentials.token)

    def files(self) -> Sequence[RemoteFile]:
        """See `Source`. Returns the file, or all those that the model is split into. A file's
        version is the server's entity tag."""
        return [self._remote_file(name) for name in parts_of(self._uri.path)]

    def _remote_file(self, name: str) -> RemoteFile:
        url = self._uri.text.removesuffix(self._uri.path) + name
        head = self._ranges.head(url)
        version = head.version or f"of {head.size} bytes"
        return RemoteFile(name, head.size, version, url)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """See `Source`."""
        version = "" if file.version.startswith("of ") else file.version
        return self._ranges.read(file.locator, start, end, version)

    def close(self) -> None:
        """See `Source`."""
        self._ranges.close()
