"""What the fetcher asks of a place that models come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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
