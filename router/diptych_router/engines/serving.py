"""`serving.json`: the operator's last decision which revisions may serve.

It is a ConfigMap's file, which is replaced while the router runs, so it is read repeatedly.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from diptych_protocol import UNREADABLE

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 10


class Serving(msgspec.Struct, frozen=True):
    """The operator's decision. Unknown fields are ignored, because a newer operator
    may add some."""

    revisions: list[str] = []
    """Revisions that get new requests; empty means all."""
    asleep: bool = False
    """The pools are empty on purpose: hold requests until they are not."""


class ServingFile:
    """The file's newest valid content."""

    def __init__(self, path: Path | None) -> None:
        """None: there is no such file, and every revision may serve."""
        self._path = path
        self._seen: bytes | None = None
        self.serving = Serving()

    def refresh(self) -> bool:
        """Read the file again; True if its content has changed.

        A missing file means no decision. An invalid one changes nothing, and is logged once.
        """
        if self._path is None:
            return False
        content = self._read(self._path)
        if content == self._seen:
            return False
        self._seen = content
        before = self.serving
        try:
            self.serving = self._parse(content)
        except (ValueError, *UNREADABLE) as exc:
            log.error("%s is malformed, so what it said before stays: %s", self._path, exc)
        return self.serving != before

    def _read(self, path: Path) -> bytes | None:
        try:
            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as exc:
            log.warning("cannot read %s: %s", path, exc)
            return self._seen

    def _parse(self, content: bytes | None) -> Serving:
        if content is None:
            return Serving()
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return msgspec.json.decode(content, type=Serving)
