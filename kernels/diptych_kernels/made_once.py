"""Files that one process of a machine makes for all: compiled kernels, packed weights."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

log = logging.getLogger(__name__)

LOCK_POLL_S: Final = 0.1
PART: Final = ".part"
"""The suffix of a file that is being written."""
DONE: Final = ".done"
"""The suffix of a file that says that others are there."""
NODE_FOLDER: Final = "DIPTYCH_NODE_WEIGHTS"
"""The variable with the folder of the node's cache: engines read it, `pack_ahead` writes it."""


def user_folder(kind: str) -> Path:
    """Return the folder of the user's cache directory for a kind of files. It may not exist."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "diptych" / kind


def stamp_of(sources: Iterable[Path]) -> bytes:
    """Return what changes with any of these files. It depends on inodes and times instead of the
    content, which no start reads twice. Nobody can change a file and keep the time of its last
    change (`st_ctime`)."""
    stamps = (
        (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        for found in (source.stat() for source in sources)
    )
    return repr(list(stamps)).encode()


@contextlib.contextmanager
def locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold a lock, which the system frees however this process ends; after the deadline go on
    without it. Raises `OSError` where there can be no lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        told = False
        while not try_lock(lock):
            if time.monotonic() > deadline:
                log.warning("another process has held %s for too long; not waiting for it", path)
                break
            if not told:
                log.info("another process makes %s; waiting for it", path.stem)
                told = True
            threading.Event().wait(LOCK_POLL_S)
        yield
    finally:
        # Who has opened this file, or opens the next one of its name, looks for what it guards
        # again when it has the lock.
        path.unlink(missing_ok=True)
        os.close(lock)


def try_lock(lock: int) -> bool:
    """Lock an open file or folder, as long as any copy of this descriptor is open, unless another
    process has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def whole(place: Path, mode: int) -> Iterator[BinaryIO]:
    """Write a file whole or not at all: other processes may look for it. What writers of it left
    that were killed is removed. Raises `OSError`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    for left in place.parent.glob(f"{place.name}.*{PART}"):
        remove_unused(left)
    descriptor, temporary = tempfile.mkstemp(PART, f"{place.name}.", place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            use(descriptor)
            os.fchmod(descriptor, mode)
            yield file
        Path(temporary).rename(place)
    finally:
        Path(temporary).unlink(missing_ok=True)


def use(descriptor: int) -> None:
    """Keep a file from `remove_unused`, as long as any copy of this descriptor is open (a mapping
    has one), where there are locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_unused(path: Path) -> None:
    """Remove a file unless a process uses it, or it cannot be removed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if try_lock(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


def clear(path: Path) -> None:
    """Remove a file, or what lies in its place: a folder with all that is in it. Raises `OSError`
    if that is impossible; nothing there is fine."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def is_private(found: os.stat_result) -> bool:
    """Whether nobody but this user, and root, can write a file or folder."""
    writable = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.geteuid() and not found.st_mode & writable
