"""Delays answers that depend on steps, on the hinge, or on another thread.

A utility call that cannot be answered at once returns a `Future`. The engine's loop continues and
sends the answer when there is one, so nobody else waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class _Waiting:
    ready: Callable[[], bool]
    then: Callable[[], Any]
    answer: Future[Any]


class Deferred:
    """Functions that wait until the engine is in some state."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def when(self, ready: Callable[[], bool], then: Callable[[], T]) -> Future[T]:
        """Call `then` between two steps as soon as `ready` returns true; the future gets its
        result.

        If either of them raises, the future gets the exception.
        """
        answer: Future[T] = Future()
        self._waiting.append(_Waiting(ready, then, answer))
        return answer

    def settle(self) -> None:
        """Call every function that is ready. Call this after a step, when its outputs were sent."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        kept = [entry for entry in waiting if not _try(entry)]
        self._waiting = kept + self._waiting


def _try(entry: _Waiting) -> bool:
    """Whether this is over, one way or the other."""
    if entry.answer.cancelled():
        return True
    try:
        if not entry.ready():
            return False
        entry.answer.set_result(entry.then())
    except Exception as exc:  # it fails whoever called, not the engine
        entry.answer.set_exception(exc)
    return True
