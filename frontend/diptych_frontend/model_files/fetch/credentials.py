"""Credentials for models that are not public: files of a mounted Secret, one for each key.

Only the fetching process reads them. Without any, the clients' own ways apply (environment,
workload identity, instance metadata).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from diptych_frontend.model_files.fetch.source import CREDENTIALS, BadSourceError

MAX_KEY_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys; an empty text stands for one that was not given. `repr` shows none of them."""

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
