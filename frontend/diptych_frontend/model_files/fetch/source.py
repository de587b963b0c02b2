"""The interface of a place that models come from."""

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
    """The name in the model's folder."""
    size: int
    version: str
    """A blob's id or an entity tag, which changes with the content."""
    locator: str
    """The source's own name for it: an object's key or a URL."""
    checksum: Checksum | None = None


class Source(Protocol):
    """One model at one place. Several threads call its methods."""

    def files(self) -> Sequence[RemoteFile]:
        """Return all files of the model that the source has now.

        Raises `UnreachableError` without an answer and `BadSourceError` if the source refuses.
        """

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Return exactly the bytes from `start` up to `end`, within a deadline of its own.

        Raises the same errors, and `ChangedError` if the file has another version now.
        """

    def close(self) -> None:
        """Close its connections."""
