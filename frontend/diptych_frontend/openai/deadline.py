"""Time limits for the steps of one request, with a single timer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Limits the time of each step of one task.

    Setting a timer of the event loop takes longer than writing a token. So there is one timer at a
    time. When it fires, mostly too early, it checks whether the present step is late.
    """

    def __init__(self) -> None:
        """Limit the current task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Deadline needs a task to interrupt")
        self.task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self._due = math.inf
        """When the step under way is late; infinite between two steps."""
        self._late = False
        """The step under way was cancelled for it."""

    async def within(self, seconds: float, step: Awaitable[T]) -> T:
        """Await the step. Raises `TimeoutError` if it takes longer; then it is cancelled."""
        self.begin(seconds)
        try:
            return await step
        except asyncio.CancelledError as exc:
            if self.has_cancelled():
                raise TimeoutError from exc
            raise
        finally:
            self.end()

    def begin(self, seconds: float) -> None:
        """Begin a step that is cancelled after this time unless `end` is called. The code that
        catches the `CancelledError` calls `has_cancelled`. This is `within` without its
        coroutine."""
        self._late = False
        self._due = self._loop.time() + seconds
        if self._due < self._rings_at:
            self._set_timer()

    def has_cancelled(self) -> bool:
        """Whether the deadline, and not somebody else, caused the `CancelledError` that was just
        caught."""
        return self._late and self.task.uncancel() <= self._cancelling

    def end(self) -> None:
        """End the step."""
        self._due = math.inf

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self.close()
        self._rings_at = self._due
        self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        late = self._due <= self._rings_at
        self._timer, self._rings_at = None, math.inf
        if late:
            self._late = True
            self.task.cancel()
        elif self._due < math.inf:
            self._set_timer()
