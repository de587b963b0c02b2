"""What it takes to fetch a model that is not public: files of a mounted Secret, one for each key.

They are read by the fetching process alone. Where none are given the clients' own ways apply
(environment, workload identity, instance metadata).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from diptych_frontend.model_files.fetch.errors import CREDENTIALS, BadSourceError

MAX_KEY_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Credentials:
    """An empty text is a key that was not given. Nothing of this appears in `repr`."""

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
    """The keys in a mounted Secret. Raises `BadSourceError` for none at all, or an unusable one."""
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
