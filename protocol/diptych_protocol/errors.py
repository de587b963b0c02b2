"""The errors that cross an interface, divided by who is at fault.

DiptychError
├── InvalidRequestError      the caller is at fault; HTTP 400 (or `status`), names the field
│   ├── NoParametersError     a request without parameters; an AssertionError, too
│   └── RefusedByEngineError  found by the engine core, which has informed everybody concerned
├── EngineGenerateError      this request failed inside the engine; HTTP 500, may be retried
├── EngineOverloadedError    no room now; HTTP 503, retry later
│   └── TenantOverloadedError  because of the caller's own requests; HTTP 429
│       └── QuotaExceededError   its API key has used the tokens that it may
├── EngineDeadError          the engine core is gone; HTTP 500 for all its requests
│   └── ClientClosedError    the client object was used after shutdown()
├── UtilityError             a control call failed in the core; carries its message
└── UnsupportedFeatureError  this engine does not offer the method
    ├── AbsentError           it has no such attribute; an AttributeError, too
    └── NotKeptError          it was configured not to keep this; an AssertionError, too
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""The errors of decoding bytes that are not what was expected, are no UTF-8, or are nested too
deeply.

Code that decodes foreign data catches all of them and raises an error of this project.
"""


class DiptychError(Exception):
    """The base of every error that this project raises on purpose."""


class InvalidRequestError(DiptychError, ValueError):
    """The request can never succeed as written."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        """The offending field, as the OpenAI API's `error.param`."""
        self.status = status
        self.code = code
        """A machine-readable reason, as the OpenAI API's `error.code`."""


class RefusedByEngineError(InvalidRequestError):
    """The engine core refused the request, and released what others hold for it."""


T = TypeVar("T")


def converted(value: Any, kind: type[T], what: str, param: str, *, strict: bool = True) -> T:
    """Return a value from outside as a `kind`. Raises `InvalidRequestError` that says of what it
    is, and what is wrong with it. strict: texts of numbers are no numbers."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except UNREADABLE as exc:
        raise InvalidRequestError(f"{what}: {exc}", param=param) from exc


class EngineGenerateError(DiptychError):
    """One request failed inside the engine; the engine itself is well."""


class EngineOverloadedError(DiptychError):
    """The service has no capacity for this request at the moment."""

    def __init__(self, message: str = "", *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When it may have, in seconds from now, as the header Retry-After."""


class TenantOverloadedError(EngineOverloadedError):
    """There is no capacity because of other requests of the same API key."""


class QuotaExceededError(TenantOverloadedError):
    """An API key has used the tokens that it may. `retry_after_s`: 0 if that will not change."""

    def __init__(self, message: str, *, retry_after_s: int, code: str) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.code = code
        """The reason, as the OpenAI API's `error.code`."""


class EngineDeadError(DiptychError):
    """The engine core died; the message carries the first known cause."""


class ClientClosedError(EngineDeadError):
    """The client was closed by its owner. In vLLM this is an `EngineDeadError`, too."""


class UtilityError(DiptychError):
    """A control call raised inside the engine core."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field of an argument that was refused; None: it is not at fault."""


class UnsupportedFeatureError(DiptychError, NotImplementedError):
    """The engine does not offer this feature."""


class AbsentError(UnsupportedFeatureError, AttributeError):
    """The engine does not have what an attribute names; vLLM's attribute is missing then."""


class NotKeptError(UnsupportedFeatureError, AssertionError):
    """The engine was configured not to keep what is asked for; vLLM fails an assertion then."""


class NoParametersError(InvalidRequestError, AssertionError):
    """A request lacks its parameters; vLLM fails an assertion then."""
