"""The interface of a place that models come from, the keys to it, and the errors, by who can solve
the problem.

FetchError            the source or the cache failed; another attempt may work (exit code 1)
├── UnreachableError  the source did not answer, or broke off; a cached copy may be used
├── ChangedError      the source holds another version than it did a moment ago
└── BadSourceError    the service asks for what does not exist as written (exit code 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal, Protocol

from diptych_protocol import DiptychError


class FetchError(DiptychError):
    """One line that says what went wrong, and what to do."""


class UnreachableError(FetchError):
    """The source did not answer, or broke off. Another attempt may succeed."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """The source asked for at least this pause."""


class ChangedError(FetchError):
    """The parts fetched so far and the next ones belong to different versions."""


class BadSourceError(FetchError):
    """`field` of the service is wrong; `str()` is `field: problem; remedy`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


URI = "spec.model.uri"
REVISION = "spec.model.revision"
SHA256 = "spec.model.sha256"
CREDENTIALS = "spec.model.credentials"
CACHE = "spec.model.cache"


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


MAX_KEY_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys for models that are not public; an empty text stands for one that was not given. `repr`
    shows none of them.

    Only the fetching process has them. Without any, the clients' own ways apply (environment,
    workload identity, instance metadata).
    """

    token: str = field(default="", repr=False)
    """For hf:// and https://."""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    region: str = ""
    endpoint: str = ""
    """URL of an S3-compatible store, or of a mirror of the Hugging Face hub."""

    def __post_init__(self) -> None:
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise BadSourceError(
                CREDENTIALS, "access-key-id and secret-access-key need each other; give both"
            )
        if "@" in self.endpoint:  # it appears in messages
            raise BadSourceError(
                CREDENTIALS, "endpoint holds a user or password; give them in keys of their own"
            )


def read_credentials(folder: Path) -> Credentials:
    """Read the keys of a mounted Secret. Raises `BadSourceError` if there is none, or an unusable
    one."""
    found = {}
    for key in (item.name for item in fields(Credentials)):
        path = folder / key.replace("_", "-")
        if path.is_file():
            found[key] = _read_key(path)
    if not found:
        known = ", ".join(item.name.replace("_", "-") for item in fields(Credentials))
        raise BadSourceError(CREDENTIALS, f"the Secret has none of the keys {known}; add one")
    return Credentials(**found)


def _read_key(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_KEY_BYTES + 1)
    text = raw.decode("ascii", errors="replace").strip()
    if len(raw) > MAX_KEY_BYTES or not text.isascii() or not text.isprintable():
        raise BadSourceError(CREDENTIALS, f"the key {path.name!r} is not one line of text")
    return text
