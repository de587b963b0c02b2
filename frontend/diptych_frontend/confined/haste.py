"""Lets a thread that must not block, such as an event loop's, ask only for quick answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class NotAtOnceError(Exception):
    """The work takes longer than its caller may wait here. Repeat all of it elsewhere."""


_hurried: ContextVar[bool] = ContextVar("hurried", default=False)


def is_hurried() -> bool:
    """Whether this thread may wait for a few milliseconds at most."""
    return _hurried.get()


@contextmanager
def hurried() -> Iterator[None]:
    """During the block, a question to a process is answered within milliseconds or raises
    `NotAtOnceError`."""
    token = _hurried.set(True)
    try:
        yield
    finally:
        _hurried.reset(token)
