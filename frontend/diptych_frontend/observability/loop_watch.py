"""Measures how late the event loop is, and names who held it up.

The loop is expected to `tick` every `TICK_S`. How late it comes is its lag. A thread looks on: when
a tick is overdue by `LONG_S` it takes down what the loop's thread is at, which no code on the loop
could. If that holds the GIL, the thread sees it as soon as it lets go, which is before the loop
goes on to anything else.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Self

logger = logging.getLogger("diptych.loop")

TICK_S: Final = 0.1
LONG_S: Final = 0.1
"""A lag that is worth a line in the log."""


class LoopWatch:
    """Enter it in the loop's thread; the looking on ends with the block."""

    def __init__(self, on_lag: Callable[[float], object]) -> None:
        """`on_lag(seconds)` is called at each tick."""
        self._on_lag = on_lag
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="loop-watch", daemon=True)
        self._ticked_at = 0.0
        self._seen: str | None = None
        """What held the loop up since the last tick."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ticked_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def tick(self) -> None:
        now = time.monotonic()
        lag = max(0.0, now - self._ticked_at - TICK_S)
        self._ticked_at = now
        seen, self._seen = self._seen, None
        self._on_lag(lag)
        if lag > LONG_S:
            logger.warning("the event loop was held up for %.2f s: %s", lag, seen or "not seen")

    def _look_on(self) -> None:
        wait_s = TICK_S
        while not self._ended.wait(wait_s):
            left_s = self._ticked_at + TICK_S + LONG_S - time.monotonic()
            if left_s <= 0 and self._seen is None:
                self._seen = self._activity()
            wait_s = left_s if left_s > 0 else TICK_S

    def _activity(self) -> str:
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._loop_thread)
        doing = "no task" if task is None else task.get_name()
        return f"{doing}, in {_place(frame)}"


def _place(frame: FrameType | None) -> str:
    """The innermost function of ours that runs, or of anybody's if none of ours does."""
    innermost = frame
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("diptych"):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "no function"
    module = frame.f_globals.get("__name__", "?")
    return f"{module}.{frame.f_code.co_qualname}:{frame.f_lineno}"
