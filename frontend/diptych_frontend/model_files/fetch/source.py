"""What the fetcher asks of a place that models come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from diptych_frontend.model_files.fetch.credentials import Credentials
from diptych_frontend.model_files.fetch.errors import URI, BadSourceError, FetchError
from diptych_protocol.model_uri import ModelUri


@dataclass(frozen=True, slots=True)
class Checksum:
    algorithm: Literal["sha256", "git-sha1"]
    """`git-sha1` is the id that git gives a file's content."""
    digest: str
    """Hexadecimal."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    """In the model's folder."""
    size: int
    version: str
    """Another content has another version: a blob's id or an entity tag."""
    locator: str
    """Where the source finds it: an object's key or a URL."""
    checksum: Checksum | None = None


class Source(Protocol):
    """One model at one place. Its methods are called from several threads."""

    def files(self) -> Sequence[RemoteFile]:
        """All files of the model that the source knows of, as they are now.

        Raises `UnreachableError` without an answer and `BadSourceError` for an answer that says no.
        """

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Exactly the bytes from `start` up to `end`, within a deadline of its own.

        Raises the same errors, and `ChangedError` if the file is no longer of this version.
        """

    def close(self) -> None:
        """Give its connections back."""


def open_source(uri: ModelUri, revision: str, credentials: Credentials) -> Source:
    """The client of one scheme; each comes with libraries that nothing else needs."""
    try:
        match uri.scheme:
            case "hf":
                from diptych_frontend.model_files.fetch.hub import HubSource

                return HubSource(uri, revision, credentials)
            case "s3":
                from diptych_frontend.model_files.fetch.s3 import S3Source

                return S3Source(uri, credentials)
            case "https":
                from diptych_frontend.model_files.fetch.web import WebSource

                return WebSource(uri, credentials)
            case _:
                raise BadSourceError(URI, f"{uri.text} needs no fetching; it is read in place")
    except ModuleNotFoundError as exc:
        raise FetchError(
            f"{uri.scheme}:// needs the package {exc.name!r}; install diptych[fetch] in this image"
        ) from exc
