"""How a thread that others wait for, as that of an event loop, asks for what takes no time only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class NotAtOnceError(Exception):
    """The work takes longer than its caller may wait here; do all of it again elsewhere."""


_hurried: ContextVar[bool] = ContextVar("hurried", default=False)


def is_hurried() -> bool:
    """Whether this thread may wait for a few milliseconds at most."""
    return _hurried.get()


@contextmanager
def hurried() -> Iterator[None]:
    """What asks a process meanwhile gets its answer within milliseconds, or `NotAtOnceError`."""
    token = _hurried.set(True)
    try:
        yield
    finally:
        _hurried.reset(token)
