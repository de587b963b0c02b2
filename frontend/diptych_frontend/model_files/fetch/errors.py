"""Why a model could not be fetched, and whose fault that is.

FetchError            the source or the cache failed; another attempt may work (exit code 1)
├── UnreachableError  the source did not answer, or broke off; a cached copy may serve instead
├── ChangedError      the source holds another version than it did a moment ago
└── BadSourceError    what the service asks for cannot be had as written (exit code 2)
"""

from __future__ import annotations

from diptych_protocol import DiptychError


class FetchError(DiptychError):
    """One line: what went wrong, and what to do."""


class UnreachableError(FetchError):
    """Worth another attempt."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """The source asked for at least this pause."""


class ChangedError(FetchError):
    """What has been fetched so far and what would come now do not belong together."""


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
