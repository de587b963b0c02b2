"""Measures the lag of the event loop, and reports which code delayed it.

The loop should `tick` every `TICK_S`; its delay is the lag. When a tick is overdue by `LONG_S`, a
second thread records the stack of the loop's thread, which no code on the loop could do. If the
loop's thread holds the GIL, the second thread gets it before the loop continues with anything else.

faulthandler reads the stack, at once. Python code that walks the frames of a running thread crashes
the interpreter (python/cpython issues 99110, 106883).
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Final, Self

logger = logging.getLogger("diptych.loop")

TICK_S: Final = 0.1
LONG_S: Final = 0.1
"""A lag from here on is logged."""
DUMP_BYTES: Final = 1 << 16
"""The capacity of a pipe: a dump of several hundred calls."""
_THREAD: Final = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+) ")
_CALL: Final = re.compile(r'  File "(.*)", line (\S+) in (.*)')
_OURS: Final = re.compile(r"(?:.*/)?(diptych\w*(?:/\w+)*)\.py")


class LoopWatch:
    """Watches the loop of the thread that enters this context, until the block ends."""

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

    def __exit__(self, *_: object) -> None:
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
        doing = "no task" if task is None else task.get_name()
        try:
            return f"{doing}, in {_place(self._loop_thread, _dump())}"
        except OSError as exc:  # there may be no descriptor left
            return f"{doing}; its stack cannot be read: {exc.strerror}"


def _dump() -> str:
    """The calls of all threads, in the words of faulthandler."""
    reading, writing = os.pipe()
    with open(reading, "rb") as dump:
        try:
            os.set_blocking(writing, False)  # what does not fit is left out
            faulthandler.dump_traceback(writing)
        finally:
            os.close(writing)
        return dump.read(DUMP_BYTES).decode(errors="replace")


def _place(thread: int, dump: str) -> str:
    """The innermost function of ours that a thread runs, or of anybody's if none of ours does."""
    innermost, at_it = "", False
    for line in dump.splitlines():
        if header := _THREAD.match(line):
            at_it = int(header[1], 16) == thread
        elif at_it and (call := _CALL.fullmatch(line)):
            path, number, function = call.groups()
            if ours := _OURS.fullmatch(path):
                return f"{ours[1].replace('/', '.')}.{function}:{number}"
            innermost = innermost or f"{path}:{number} in {function}"
    return innermost or "no function"
