"""`serving.json`: the operator's last decision which revisions may serve.

It is a ConfigMap's file, which is replaced while the router runs, so it is read repeatedly.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from diptych_frontend.openai.mounted import read
from diptych_protocol import UNREADABLE
from diptych_protocol.admin import TrialReport
from diptych_protocol.router_settings import Serving

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 10


ALL_REQUESTS: Final = 100


class RevisionShare:
    """Gives a revision its share of new requests, and counts how they go. The share is exact: after
    any number of requests it is less than one request away."""

    def __init__(self, serving: Serving) -> None:
        self.revision, self.weight = serving.canary, serving.weight
        self.counts = Counter[str]()
        """By the fields of `TrialReport`."""
        self._others = tuple(name for name in serving.revisions if name != serving.canary)
        self._owed = 0

    def now_other(self, serving: Serving) -> bool:
        """Whether the operator now wants another share, or other revisions beside it."""
        others = tuple(name for name in serving.revisions if name != serving.canary)
        wanted = serving.canary, serving.weight, others
        return wanted != (self.revision, self.weight, self._others)

    def draw(self, asked: str | None) -> tuple[str, ...]:
        """Return the revisions that may take a new request. asked: `canary` or `stable`, where the
        client has chosen."""
        if asked is None:
            self._owed += self.weight
            if self._owed >= ALL_REQUESTS:
                self._owed -= ALL_REQUESTS
                asked = "canary"
        return (self.revision,) if asked == "canary" else self._others

    def report(self, num_open: int) -> TrialReport:
        counts = self.counts
        return TrialReport(revision=self.revision, weight=self.weight, open=num_open, **counts)


class ServingFile:
    """The file's newest valid content."""

    def __init__(self, path: Path | None) -> None:
        """None: there is no such file, and every revision may serve."""
        self._path = path
        self._complaint = ""
        """Why the content is not what `serving` is."""
        self.serving = Serving()

    def refresh(self) -> bool:
        """Read the file again; True if its content has changed.

        A missing file means no decision. An invalid one changes nothing, and is logged once.
        """
        if self._path is None:
            return False
        before, complaint = self.serving, ""
        try:
            self.serving = msgspec.json.decode(read(self._path, MAX_BYTES), type=Serving)
        except FileNotFoundError:
            self.serving = Serving()
        except (OSError, *UNREADABLE) as exc:
            complaint = f"{self._path} is malformed, so what it said before stays: {exc}"
        if complaint and complaint != self._complaint:
            log.error("%s", complaint)
        self._complaint = complaint
        return self.serving != before
