"""The directory of files and batches, which the processes of several routers may share.

    CLIENT/files/ID.json        the description of a file; without it the file does not exist
    CLIENT/files/ID.data        its content
    CLIENT/batches/ID.json      the state of a batch; only the holder of its lock changes it
    CLIENT/batches/ID.results   its answers so far; the process that runs the batch locks this file
    CLIENT/batches/ID.cancel    its client has cancelled it
    open/CLIENT.ID              it has not ended

CLIENT is a digest of the name of an API key. No part of a path comes from a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, Literal, ParamSpec, TypeVar

from diptych_protocol import EngineOverloadedError, InvalidRequestError

_ID: Final = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_CLIENT: Final = re.compile(r"[0-9a-f]{32}")
_OPEN: Final = re.compile(r"([0-9a-f]{32})\.(batch_[0-9a-f]{32})")
TEMPORARY: Final = ".new"
"""The suffix of a file that is not complete yet."""


def new_id(kind: Literal["file-", "batch_"]) -> str:
    """Return a unique id; later ones sort after earlier ones. Twelve digits are milliseconds, and
    four a part of one."""
    return f"{kind}{(time.time_ns() << 16) // 1_000_000:016x}{secrets.token_hex(8)}"


def is_id(text: str, kind: Literal["file-", "batch_"]) -> bool:
    """Whether a text has the form of our ids. Only such texts become part of a path."""
    return text.startswith(kind) and _ID.fullmatch(text) is not None


def client_name(client: str) -> str:
    """Return the name of a client's folder, by that of its API key, which may be empty."""
    return hashlib.blake2b(client.encode(), digest_size=16).hexdigest()


class Folder:
    """The paths in the directory. Nothing is cached, because other processes change it too."""

    def __init__(self, root: Path) -> None:
        """Create the directory. Raises `InvalidRequestError` if it cannot be written to."""
        self._root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open.mkdir(mode=0o700, exist_ok=True)
            write_whole(self._open / ".writable", b"")
        except OSError as exc:
            raise InvalidRequestError(
                f"the batch directory {root} cannot be written to: {exc}", param="batch-directory"
            ) from exc

    @property
    def _open(self) -> Path:
        return self._root / "open"

    def files(self, client: str) -> Path:
        """Return the folder of a client's files."""
        return self._root / client_name(client) / "files"

    def batches(self, client: str) -> Path:
        """Return the folder of a client's batches."""
        return self._root / client_name(client) / "batches"

    def prepare(self, client: str) -> None:
        """Create the folders of a client."""
        files = self.files(client)
        for folder in (files.parent, files, self.batches(client)):
            folder.mkdir(mode=0o700, exist_ok=True)

    def mark_open(self, client: str, batch_id: str) -> None:
        """Mark a batch as open, so that runners find it."""
        write_whole(self._open / f"{client_name(client)}.{batch_id}", b"")

    def unmark(self, state: Path) -> None:
        """Remove the mark of a batch in this state, which runners need no longer."""
        marker = self._open / f"{state.parent.parent.name}.{state.stem}"
        marker.unlink(missing_ok=True)

    def open_batches(self) -> list[Path]:
        """Return the paths of the states of all open batches, the oldest first. The state of a
        batch that was just created or has just ended may be missing."""
        with os.scandir(self._open) as entries:
            found = [_OPEN.fullmatch(entry.name) for entry in entries]
        pairs = sorted((match[2], match[1]) for match in found if match)
        return [self._root / client / "batches" / f"{batch}.json" for batch, client in pairs]

    def clients(self) -> list[Path]:
        """Return the folders of all clients that ever had a file."""
        with os.scandir(self._root) as entries:
            return [Path(entry.path) for entry in entries if _CLIENT.fullmatch(entry.name)]

    def bytes_of(self, client: str) -> int:
        """Return the number of bytes that a client has stored."""
        return size_of(self.files(client).parent)

    def bytes_of_all(self) -> int:
        """Return the number of bytes that all clients have stored."""
        return sum(map(size_of, self.clients()))


def ids_in(folder: Path) -> list[str]:
    """Return the ids of the files or batches in a folder, the oldest first."""
    try:
        with os.scandir(folder) as entries:
            states = [entry.name for entry in entries if entry.name.endswith(".json")]
    except FileNotFoundError:
        return []
    return sorted(name for state in states if _ID.fullmatch(name := state.removesuffix(".json")))


def size_of(client: Path) -> int:
    """Return the number of bytes in the folders of a client."""
    return sum(entry.stat().st_size for entry in entries_of(client))


def entries_of(client: Path) -> Iterator[os.DirEntry[str]]:
    """Return the entries of a client's folders, except those that are just being removed."""
    for name in ("files", "batches"):
        try:
            with os.scandir(client / name) as entries:
                found = list(entries)
        except FileNotFoundError:
            continue
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                entry.stat()
                yield entry


def create(path: Path) -> BinaryIO:
    """Create an empty file that only the user of this process can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    return open(descriptor, "wb")


def sync(file: BinaryIO) -> None:
    """Make sure that what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def synced(path: Path, pieces: Iterable[bytes], tag: str = "") -> int:
    """Write a file completely or not at all, even if the machine stops; return its size. tag: tells
    writers at the same time apart."""
    partial = path.with_name(f"{path.name}{tag}{TEMPORARY}")
    try:
        with create(partial) as file:
            file.writelines(pieces)
            sync(file)
            size = file.tell()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def write_whole(path: Path, content: bytes) -> None:
    """Do the same with a small file that others may write, too."""
    synced(path, (content,), f".{secrets.token_hex(8)}")


log = logging.getLogger(__name__)

THREADS: Final = 4
PATIENCE_S: Final = 60.0
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}

P = ParamSpec("P")
T = TypeVar("T")


class Disk:
    """Runs blocking calls on the disk, which may be across the network. The threads end when
    this object is garbage-collected."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="batches")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` and return its result, or raise its error. Raises `EngineOverloadedError` if
        the disk is full, fails or does not answer; `work` may continue then."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.run_long(work, *args, **kwargs)
        except TimeoutError as exc:
            raise EngineOverloadedError("the batch directory does not answer; retry later") from exc
        except OSError as exc:
            log.error("the batch directory fails: %s", exc)
            what = "is full" if exc.errno in _FULL else "fails"
            raise EngineOverloadedError(f"the batch directory {what}; retry later") from exc

    async def run_long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on whole files, without a time limit. Raises `OSError` itself."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(work, *args, **kwargs))

    def close(self, file: BinaryIO) -> None:
        """Close a file once no thread uses it."""
        # A thread whose caller has given up may still use the file, and its descriptor must not
        # become that of another file meanwhile.
        self._executor.submit(_close, file)


def _close(file: BinaryIO) -> None:
    try:
        file.close()  # waits for the file's own lock
    except OSError as exc:
        log.error("a file of a batch cannot be closed: %s", exc)
