"""Threads with a large stack, because llguidance recurses along chains of rules and references, and
a stack overflow ends the process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

MAX_FORM_BYTES: Final = 128 << 10
"""Limit on a form, encoded. The costliest that were found within it compile in 2.5 s."""
STACK_PER_BYTE: Final = 1024
"""The most that was measured is 0.5 kB of stack per byte of a form in which each part contains the
next one. Only stack that is used takes memory."""
_creating = threading.Lock()


def deep_executor(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread, which can compile any form that is not too large."""
    executor = ThreadPoolExecutor(1, name)
    with _creating:  # the size is one of the process, for threads that start
        before = threading.stack_size(STACK_PER_BYTE * MAX_FORM_BYTES)
        try:
            executor.submit(lambda: None)  # starts the thread
        finally:
            threading.stack_size(before)
    return executor
