"""Processes that tests look for.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def running(processes: Iterable[psutil.Process], *words: str) -> list[psutil.Process]:
    """Those whose command lines have all of these words. Some may have ended since they were
    found."""
    found = []
    for process in processes:
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:  # or it is a zombie
            continue
        if all(word in line for word in words):
            found.append(process)
    return found
