"""What the caller of confined work says of it: it is in haste, or nobody waits any longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Final


class NotAtOnceError(Exception):
    """The work takes longer than its caller may wait here. Repeat all of it elsewhere."""


in_haste: Final = ContextVar("in_haste", default=False)
"""Whether this thread may wait for a few milliseconds at most: then a question to a process is
answered within them or raises `NotAtOnceError`."""


class WorkCancelledError(Exception):
    """Nobody waits for this work any longer."""


class Cancellation:
    """Cancels one piece of work. `cancel` may be called from any thread, at any time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._cancelled = False
        self._end: Callable[[], None] | None = None

    def cancel(self) -> None:
        """End the work in progress, and do not begin what would come next."""
        with self._lock:
            self._cancelled = True
            if self._end is not None:
                self._end()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @contextmanager
    def ending_by(self, end: Callable[[], None]) -> Iterator[None]:
        """During the block, cancel the work by calling `end`. Raises `WorkCancelledError` if it was
        cancelled before."""
        with self._lock:
            if self._cancelled:
                raise WorkCancelledError
            self._end = end
        try:
            yield
        finally:
            with self._lock:
                self._end = None


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def current_cancellation() -> Cancellation:
    """Return the cancellation of this thread's work, or one that nobody can use if none was set."""
    return _current.get() or Cancellation()


@contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """During the block, `cancellation` ends what this thread does."""
    token = _current.set(cancellation)
    try:
        yield
    finally:
        _current.reset(token)
