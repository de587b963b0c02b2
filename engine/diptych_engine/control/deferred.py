"""Answers that have to wait: for steps, for the hinge, or for another thread.

A utility call that cannot be answered at once returns a `Future`. The engine's loop goes on and
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
    """What waits for the engine to get into some state."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def when(self, ready: Callable[[], bool], then: Callable[[], T]) -> Future[T]:
        """Call `then` as soon as `ready` says so, between two steps; the future has its result.

        What either of them raises becomes the future's exception.
        """
        answer: Future[T] = Future()
        self._waiting.append(_Waiting(ready, then, answer))
        return answer

    def settle(self) -> None:
        """Do what has become possible. Belongs after a step, when its outputs were sent."""
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
