"""https://HOST/FILE.gguf: one file of any web server."""

from __future__ import annotations

from collections.abc import Sequence

from diptych_frontend.model_files.fetch.credentials import Credentials
from diptych_frontend.model_files.fetch.http_ranges import HttpRanges
from diptych_frontend.model_files.fetch.source import RemoteFile
from diptych_protocol.model_uri import ModelUri


class WebSource:
    """A web server promises little: only a checksum in the service says what the file should be."""

    def __init__(self, uri: ModelUri, credentials: Credentials) -> None:
        self._uri = uri
        self._ranges = HttpRanges(credentials.token)

    def files(self) -> Sequence[RemoteFile]:
        """See `Source`: one file, of the version that the server's entity tag names."""
        url = self._uri.text
        head = self._ranges.head(url)
        version = head.version or f"of {head.size} bytes"
        return [RemoteFile(self._uri.path, head.size, version, url)]

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """See `Source`."""
        version = "" if file.version.startswith("of ") else file.version
        return self._ranges.read(file.locator, start, end, version)

    def close(self) -> None:
        """See `Source`."""
        self._ranges.close()
