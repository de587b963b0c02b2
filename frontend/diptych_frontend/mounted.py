"""Files of a mounted Secret, which the kubelet exchanges under the running program.

Whoever holds such files looks at them again and again, and reads them when they have changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
MAX_FILES = 256
"""Files of one directory that are looked at; the others do not exist for us."""

Mark = tuple[tuple[str, int, int, int], ...]
"""Name, size, time and identity of each file: another mark is another content."""


class Mounted(Protocol):
    """What a program holds of a directory."""

    def refresh(self) -> bool:
        """Look at the files, and read them if they have changed; True if something is new.

        Never raises for what is in the directory, nor for what is not.
        """


async def follow(*holders: Mounted) -> None:
    """Keep all of them fresh until cancelled."""
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        for holder in holders:
            try:
                holder.refresh()
            except Exception:  # the next look may be luckier, and the others want theirs
                log.exception("mounted files could not be looked at")


def look(directory: Path) -> Mark:
    """What is in a directory, less what begins with a dot: the kubelet's own, and half-written.

    Raises `OSError` if it cannot be listed. A file that cannot be looked at is left out.
    """
    with os.scandir(directory) as entries:
        seen = (entry for entry in entries if not entry.name.startswith("."))
        return tuple(sorted(_marks(islice(seen, MAX_FILES))))


def _marks(entries: Iterable[os.DirEntry[str]]) -> Iterable[tuple[str, int, int, int]]:
    for entry in entries:
        try:
            if entry.is_file():
                status = entry.stat()
                yield entry.name, status.st_size, status.st_mtime_ns, status.st_ino
        except OSError:
            continue  # a link whose file has just gone


def read(path: Path, most: int) -> bytes:
    """The file's content. Raises `OSError`, also for one of more than `most` bytes."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return content
