"""A directory that holds fetched models, shared by all processes of a node or of a volume.

    NAME                  -> .content/NAME-CONTENT, a symbolic link: the model as readers find it
    .content/NAME-CONTENT    complete and verified; never changed again
    .partial/NAME-CONTENT    being fetched; survives its process, and the next one continues it
    .locks/NAME              held (flock) by whoever writes any of the above

The record beside a model only shows damage: whoever can write to the folder can write the record
too. `holds` compares files with checksums from another source.

A model appears by one rename, so a reader sees all of it or nothing. The kernel, or the server of a
network file system, releases the lock of a dead process.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from diptych_frontend.model_files.fetch.download import is_as_listed, sha256_of
from diptych_frontend.model_files.fetch.source import CACHE, Checksum, FetchError, RemoteFile
from diptych_kernels.made_once import try_lock
from diptych_protocol import UNREADABLE

logger = logging.getLogger(__name__)

RECORD: Final = ".diptych.json"
LOCK_POLL_S: Final = 0.5
OWNER_SILENCE_S: Final = 180.0
"""A holder of the lock that does not call `beat` for this long counts as dead with its machine."""
WAITING_REPORT_S: Final = 10.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Record(msgspec.Struct, frozen=True):
    """The record beside a model's files, by which missing or damaged ones are found later."""

    uri: str
    content: str
    """`selection.content_id` of the source's files."""
    files: dict[str, int]
    """File name -> bytes."""
    digests: dict[str, str] = {}
    """File name -> SHA-256 of what was fetched. Copies of earlier versions have none."""


class CacheEntry:
    """One model's place in the cache. Methods raise `FetchError` for errors of the disk."""

    def __init__(self, root: Path, name: str, *, recorded: bool = False) -> None:
        """recorded: read a copy completely, to compare it with the digests of its record."""
        self._root = root
        self._name = name
        self._recorded = recorded
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The path at which readers find the model."""
        return self._root / self._name

    def published(self) -> Record | None:
        """The record of the model that readers find; None if it is absent or damaged."""
        return self._intact(self.path)

    def holds(self, content: str, files: Sequence[RemoteFile]) -> bool:
        """Whether readers find exactly these files, as plain files with these checksums.

        It reads all of them.
        """
        final = self._final(content)
        return (
            self.path.is_symlink()
            and self.path.readlink() == final.relative_to(self._root)
            and _holds(final, files)
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the exclusive right to write this entry, on all nodes that share the cache."""
        with self._disk_errors():
            folder = self._root / ".locks"
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / self._name, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._wait_for(lock)
                self._lock = lock
                yield
            finally:
                self._lock = None
                os.close(lock)

    def beat(self) -> None:
        """Show those who wait for the lock that its holder is alive."""
        lock = self._lock
        if lock is not None:
            os.utime(lock)

    def partial(self, content: str) -> Path:
        """Return the folder to fetch `content` into, without unfinished files of other versions."""
        folder = self._root / ".partial"
        own = folder / f"{self._name}-{content}"
        if own.is_symlink():
            own.unlink()
        own.mkdir(parents=True, exist_ok=True)
        for path in own.iterdir():
            if path.is_symlink() or path.stat().st_nlink > 1:
                _remove(path)  # writing to it would change what it leads to
        for other in folder.glob(f"{self._name}-*"):
            # The name must be followed by a content id alone: names may begin with one another.
            if other != own and len(other.name) == len(own.name):
                shutil.rmtree(other)
        return own

    def check_space(self, needed: int) -> None:
        """Raise `FetchError` if this many bytes do not fit."""
        free = shutil.disk_usage(self._root).free
        if needed > free:
            raise FetchError(
                f"{CACHE}: {gib(needed)} are still to come and {gib(free)} are free in "
                f"{self._root}; enlarge the volume, or remove models from it"
            )

    def publish(self, partial: Path, uri: str, content: str, digests: dict[str, str]) -> None:
        """Make the files in `partial` visible to readers, all at once."""
        files = {
            path.name: path.stat().st_size for path in partial.iterdir() if path.name != RECORD
        }
        record = Record(uri, content, files, digests)
        (partial / RECORD).write_bytes(msgspec.json.encode(record))
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        final = self._final(content)
        final.parent.mkdir(exist_ok=True)
        _remove(final)
        partial.rename(final)
        _sync(final.parent)
        self._point_at(final)

    def restore(self, content: str, files: Sequence[RemoteFile] | None) -> bool:
        """Publish an earlier version that is still stored; False if there is none.

        files: what it must contain, as in `holds`; None trusts the record.
        """
        final = self._final(content)
        if self._intact(final) is None or not (files is None or _holds(final, files)):
            return False
        self._point_at(final)
        return True

    def _intact(self, folder: Path) -> Record | None:
        try:
            record = _record(folder)
            sizes = {name: (folder / name).stat().st_size for name in record.files}
            if sizes != record.files:
                return None
            for name, digest in record.digests.items() if self._recorded else ():
                if not (folder / name).is_file() or sha256_of(folder / name) != digest:
                    logger.warning("%s in the cache is not as it was fetched", name)
                    return None
        except (OSError, *UNREADABLE):
            return None
        return record

    def _final(self, content: str) -> Path:
        return self._root / ".content" / f"{self._name}-{content}"

    def _point_at(self, final: Path) -> None:
        link = self._root / ".content" / f"{self._name}.link"
        link.unlink(missing_ok=True)
        link.symlink_to(final.relative_to(self._root))
        if not self.path.is_symlink():
            _remove(self.path)
        link.rename(self.path)
        _sync(self._root)

    def _wait_for(self, lock: int) -> None:
        last_beat, heard_at = os.fstat(lock).st_mtime_ns, time.monotonic()
        reported_at = 0.0
        while not try_lock(lock):
            now = time.monotonic()
            beat = os.fstat(lock).st_mtime_ns
            if beat != last_beat:
                last_beat, heard_at = beat, now
            if now - heard_at > OWNER_SILENCE_S:
                raise FetchError(
                    f"{CACHE}: another process holds the lock of {self._name} and has not been "
                    f"heard of for {OWNER_SILENCE_S:.0f} s; if its node is gone, the file system "
                    "will release the lock"
                )
            if now - reported_at > WAITING_REPORT_S:
                logger.info("%s is being fetched by another process; waiting", self._name)
                reported_at = now
            threading.Event().wait(LOCK_POLL_S)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise FetchError(f"{CACHE}: {_advice(exc, self._root)}") from exc


def gib(nbytes: float) -> str:
    """Format a number of bytes for people."""
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 29 else f"{nbytes / (1 << 20):.1f} MiB"


def _record(folder: Path) -> Record:
    return msgspec.json.decode((folder / RECORD).read_bytes(), type=Record)


def _holds(folder: Path, files: Sequence[RemoteFile]) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()} - {RECORD}
    try:
        fetched = _record(folder).digests
    except (OSError, *UNREADABLE):
        fetched = {}
    # Names first: to read a large model for nothing takes long.
    return names == {file.name for file in files} and all(
        is_as_listed(folder / file.name, _with_digest(file, fetched.get(file.name)))
        for file in files
    )


def _with_digest(file: RemoteFile, fetched: str | None) -> RemoteFile:
    """For a file that its source lists without a checksum: that of what was fetched of it."""
    if file.checksum is not None or fetched is None:
        return file
    return replace(file, checksum=Checksum("sha256", fetched))


def _remove(path: Path) -> None:
    """Whatever it is; nothing, if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _advice(exc: OSError, root: Path) -> str:
    where = exc.filename or root
    match exc.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"{root} is full; enlarge the volume, or remove models from it"
        case errno.EROFS:
            return f"{root} is read-only and does not hold this model; put it there first"
        case errno.EACCES | errno.EPERM:
            return (
                f"user {os.geteuid()} may not write {where}; give the directory to that user, "
                "or take a pvc"
            )
        case code if code in _NO_LOCKS:
            return f"the file system of {root} has no locks; take one that has, such as NFS 4"
        case _:
            return f"{where}: {exc.strerror or exc}"
