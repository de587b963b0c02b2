"""The directory of files and batches, which the processes of several routers may share.

    CLIENT/files/ID.json        what is known of a file; without it there is no such file
    CLIENT/files/ID.data        its content
    CLIENT/batches/ID.json      the state of a batch; only who holds its lock writes it again
    CLIENT/batches/ID.results   its answers so far; who works on the batch holds the lock of this
    CLIENT/batches/ID.cancel    its client wants it to end
    open/CLIENT.ID              it has not ended

CLIENT is a digest of the name of an API key. No path has a part that a client chose.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Literal

from diptych_protocol import InvalidRequestError

_ID: Final = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_CLIENT: Final = re.compile(r"[0-9a-f]{32}")
_OPEN: Final = re.compile(r"([0-9a-f]{32})\.(batch_[0-9a-f]{32})")
TEMPORARY: Final = ".new"
"""The suffix of what is not whole yet."""


def new_id(kind: Literal["file-", "batch_"]) -> str:
    """An id that nobody else has; later ones come after earlier ones."""
    return f"{kind}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def is_id(text: str, kind: Literal["file-", "batch_"]) -> bool:
    """Whether it looks like one of ours. Nothing else becomes a part of a path."""
    return text.startswith(kind) and _ID.fullmatch(text) is not None


def client_name(client: str) -> str:
    """The folder of a client, by the name of its API key, which is empty without keys."""
    return hashlib.blake2b(client.encode(), digest_size=16).hexdigest()


class Folder:
    """Where things are in the directory. Nothing is remembered: others change it, too."""

    def __init__(self, root: Path) -> None:
        """Makes the directory. Raises `InvalidRequestError` if it cannot be written to."""
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
        """The folder of a client's files."""
        return self._root / client_name(client) / "files"

    def batches(self, client: str) -> Path:
        """The folder of a client's batches."""
        return self._root / client_name(client) / "batches"

    def prepare(self, client: str) -> None:
        """Make the folders of a client."""
        files = self.files(client)
        for folder in (files.parent, files, self.batches(client)):
            folder.mkdir(mode=0o700, exist_ok=True)

    def mark_open(self, client: str, batch_id: str) -> None:
        """Let runners look at this batch."""
        write_whole(self._open / f"{client_name(client)}.{batch_id}", b"")

    def unmark(self, state: Path) -> None:
        """No runner needs to look at the batch with this state any more."""
        marker = self._open / f"{state.parent.parent.name}.{state.stem}"
        marker.unlink(missing_ok=True)

    def open_batches(self) -> list[Path]:
        """The states of all batches that have not ended, the oldest first. Of one that is being
        made, or just ended, the state may be missing."""
        with os.scandir(self._open) as entries:
            found = [_OPEN.fullmatch(entry.name) for entry in entries]
        pairs = sorted((match[2], match[1]) for match in found if match)
        return [self._root / client / "batches" / f"{batch}.json" for batch, client in pairs]

    def clients(self) -> list[Path]:
        """The folders of all clients that ever had a file."""
        with os.scandir(self._root) as entries:
            return [Path(entry.path) for entry in entries if _CLIENT.fullmatch(entry.name)]

    def bytes_of(self, client: str) -> int:
        """How much a client has stored."""
        return size_of(self.files(client).parent)

    def bytes_of_all(self) -> int:
        """How much all clients have stored."""
        return sum(map(size_of, self.clients()))


def ids_in(folder: Path) -> list[str]:
    """The ids of the files or batches of a folder, the oldest first."""
    try:
        with os.scandir(folder) as entries:
            states = [entry.name for entry in entries if entry.name.endswith(".json")]
    except FileNotFoundError:
        return []
    return sorted(name for state in states if _ID.fullmatch(name := state.removesuffix(".json")))


def size_of(client: Path) -> int:
    """The bytes in the folders of a client."""
    return sum(entry.stat().st_size for entry in entries_of(client))


def entries_of(client: Path) -> Iterator[os.DirEntry[str]]:
    """What is in the folders of a client, less what goes at this moment."""
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
    """A file that only the user of this process can read, empty at first."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    return open(descriptor, "wb")


def sync(file: BinaryIO) -> None:
    """Have what was written on the disk."""
    file.flush()
    os.fsync(file.fileno())


def put(partial: Path, path: Path) -> None:
    """Give a whole file its name, for good."""
    os.replace(partial, path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, also if the machine stops."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with create(partial) as file:
            file.write(content)
            sync(file)
        put(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
