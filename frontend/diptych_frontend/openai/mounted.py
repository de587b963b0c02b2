"""Follows files of a mounted Secret, which the kubelet replaces while the program runs.

A program that uses such files checks them regularly, and reads them when they have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0

Mark = tuple[tuple[str, int, int, int], ...]
"""Name, size, time and identity of each file. Another mark means another content."""


class Mounted(Protocol):
    """What a program has read from a directory."""

    def refresh(self) -> bool:
        """Check the files, and read them if they have changed; True if something is new.

        Never raises, whatever the directory contains or lacks.
        """


async def follow(*holders: Mounted) -> None:
    """Refresh all of them regularly until cancelled."""
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        for holder in holders:
            try:
                holder.refresh()
            except Exception:  # the next look may be luckier, and the others want theirs
                log.exception("mounted files could not be looked at")


class TooManyFilesError(OSError):
    """The directory contains too many files to be what it should be."""


def names_in(directory: Path, most: int) -> list[str]:
    """Return the sorted names in a directory, except those that begin with a dot: the kubelet's
    own.

    Raises `OSError` if it cannot be listed, `TooManyFilesError` for more than `most` entries.
    """
    with os.scandir(directory) as entries:
        found = (entry.name for entry in entries if not entry.name.startswith("."))
        names = list(islice(found, most + 1))
    if len(names) > most:
        raise TooManyFilesError(f"{directory} holds more than {most} files")
    return sorted(names)


def mark(directory: Path, names: Iterable[str]) -> Mark:
    """Return the present mark of these files, without those that cannot be read."""
    found = []
    for name in names:
        with contextlib.suppress(OSError):  # a link whose file has just gone
            status = os.stat(os.path.join(directory, name))
            found.append((name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)


def read(path: Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises `OSError`."""
    # A pipe without a writer would keep us waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        content = os.read(descriptor, most + 1)
    finally:
        os.close(descriptor)
    if len(content) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return content
