"""Waits of the tests: as long as a busy machine needs, and never without saying for what.

A test waits for a condition, not for a time. `PATIENCE_S` is no expectation of how long anything
takes: it is when a wait becomes a failure with a reason, before `timeout` of pytest cuts it off."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0
FOR_EVER_S = 3600.0
"""For what a test shows to be cut short: no test outlives a wait of this length."""


class Deadline:
    """The end of one wait: `check()` again and again, between looks at what is waited for."""

    def __init__(self, what: str, seconds: float = PATIENCE_S) -> None:
        self._what = what
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """For a call that takes a timeout of its own; never negative."""
        return max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raises `AssertionError` when the time is up."""
        if time.monotonic() > self._at:
            raise AssertionError(f"waited {self._seconds:g} s in vain: {self._what}")


def wait_until(condition: Callable[[], T], what: str = "", seconds: float = PATIENCE_S) -> T:
    """The first true value of `condition`."""
    deadline = Deadline(what or source_of(condition), seconds)
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        deadline.check()
        time.sleep(pause_after(began))


def pause_after(began: float) -> float:
    """Seconds until the next look, after one that began at this time of `time.monotonic()`. A look
    that takes long, such as a request, keeps the processor from what is waited for."""
    return min(max(0.02, 4 * (time.monotonic() - began)), 0.2)


def source_of(condition: Callable[[], object]) -> str:
    """How a condition reads in the test, for those that have no better words."""
    try:
        lines = inspect.getsource(condition).split()
    except (OSError, TypeError):
        return repr(condition)
    return " ".join(lines)
