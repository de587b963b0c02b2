"""Stores clients' files: their bytes and their descriptions. All calls block on the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from diptych_frontend.batches_api.api_types import KEPT_S, FileList, FileObject
from diptych_frontend.batches_api.folder import (
    TEMPORARY,
    Folder,
    entries_of,
    ids_in,
    is_id,
    new_id,
    write_whole,
)
from diptych_protocol import UNREADABLE, InvalidRequestError

log = logging.getLogger(__name__)

MAX_FILES: Final = 1000
"""The most files of a client."""
ABANDONED_S: Final = 3600
"""Bytes that belong to no file, and were not written to for this long, are removed."""


class FileStore:
    """The files in a folder."""

    def __init__(self, folder: Folder, max_bytes: int) -> None:
        """max_bytes: limit on all bytes in the folder. One API key may use half of it."""
        self._folder = folder
        self._max_bytes = max_bytes

    def room(self, client: str) -> int:
        """Return the number of bytes that a client may still store; below zero, it has more than
        it may."""
        free = self._max_bytes - self._folder.bytes_of_all()
        if client:  # else there are no others
            free = min(free, self._max_bytes // 2 - self._folder.bytes_of(client))
        return free

    def begin(self, client: str, size: int) -> Path:
        """Return a path for the bytes of a new file of about this size.

        Raises `InvalidRequestError` if the client has no room for it.
        """
        if len(ids_in(self._folder.files(client))) >= MAX_FILES:
            raise InvalidRequestError(
                f"this client has {MAX_FILES} files already; delete some",
                status=413,
                code="too_many_files",
            )
        self.check_room(client, size)
        self._folder.prepare(client)
        return self._folder.files(client) / f"{new_id('file-')}.data"

    def check_room(self, client: str, size: int) -> int:
        """Return the client's room. Raises `InvalidRequestError` if this many more bytes are more,
        or too many are there already."""
        room = self.room(client)
        if size > room:
            raise InvalidRequestError(
                f"the file needs {max(0, size - room)} bytes more than there is room for; delete "
                "files, or ask for a larger batch directory",
                status=413,
                code="storage_full",
            )
        return room

    def add(self, content: Path, described: Callable[[str, int], FileObject]) -> FileObject:
        """Turn written bytes into a file. `described` gets its id and size."""
        made = described(content.stem, content.stat().st_size)
        write_whole(content.with_suffix(".json"), msgspec.json.encode(made))
        return made

    def get(self, client: str, file_id: str) -> FileObject:
        """Return the description of a file. Raises `InvalidRequestError` if it does not exist."""
        if is_id(file_id, "file-"):
            found = self._read(self._folder.files(client) / f"{file_id}.json")
            if found is not None:
                return found
        raise _no_such_file(file_id)

    def open(self, client: str, file_id: str) -> BinaryIO:
        """Open a file by its id, even if it expired. Raises `InvalidRequestError` without one."""
        if is_id(file_id, "file-"):
            with contextlib.suppress(FileNotFoundError):
                return (self._folder.files(client) / f"{file_id}.data").open("rb")
        raise _no_such_file(file_id)

    def open_whole(self, client: str, file_id: str) -> tuple[BinaryIO, int]:
        """Open a file, and return its size. Raises `InvalidRequestError` without one, or if it has
        lost bytes: to a client the rest would look whole, or break off."""
        known, file = self.get(client, file_id), self.open(client, file_id)
        left = os.fstat(file.fileno()).st_size
        if left != known.bytes:
            file.close()
            raise InvalidRequestError(
                f"the disk has {left} of the {known.bytes} bytes of this file; delete it, and make "
                "it anew",
                param="id",
                status=410,
                code="file_damaged",
            )
        return file, left

    def page(
        self, client: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> FileList:
        """Return the files of a client in the order of their creation, those after one of them."""
        folder = self._folder.files(client)
        ids = page_of(ids_in(folder), after, newest_first)
        found: list[FileObject] = []
        for file_id in ids:
            read = self._read(folder / f"{file_id}.json")
            if read is not None and purpose in (None, read.purpose):
                found.append(read)
            if len(found) > limit:
                break
        data = found[:limit]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return FileList(data, first, last, len(found) > limit)

    def delete(self, client: str, file_id: str) -> None:
        """Delete a file. Raises `InvalidRequestError` if it does not exist."""
        self.get(client, file_id)
        self._remove(self._folder.files(client) / f"{file_id}.json")

    def sweep(self, client: Path, used: Container[str]) -> None:
        """Delete expired files that are not used, and unfinished ones."""
        now = time.time()
        for file_id in ids_in(client / "files"):
            state = client / "files" / f"{file_id}.json"
            if file_id not in used and self._read(state) is None:
                self._remove(state)
        for entry in entries_of(client):
            path = Path(entry.path)
            is_partial = entry.name.endswith(TEMPORARY) or (
                entry.name.endswith(".data") and not path.with_suffix(".json").exists()
            )
            with contextlib.suppress(FileNotFoundError):
                if is_partial and now - entry.stat().st_mtime > ABANDONED_S:
                    path.unlink()

    def _remove(self, state: Path) -> None:
        # The state first: what is left over without it is nobody's.
        state.unlink(missing_ok=True)
        state.with_suffix(".data").unlink(missing_ok=True)

    def _read(self, state: Path) -> FileObject | None:
        """None: it is gone, or its time is over."""
        try:
            found = msgspec.json.decode(state.read_bytes(), type=FileObject)
        except FileNotFoundError:
            return None
        except UNREADABLE as exc:
            found = _damaged(state, exc)
        is_over = found.expires_at is not None and found.expires_at <= time.time()
        return None if is_over else found


def page_of(ids: list[str], after: str | None, newest_first: bool) -> list[str]:
    """Return a page of sorted ids after `after`, which may have been deleted."""
    if newest_first:
        return [each for each in reversed(ids) if after is None or each < after]
    return [each for each in ids if after is None or each > after]


def _damaged(state: Path, cause: Exception) -> FileObject:
    """What is told of a file whose description cannot be read. Its client can still fetch and
    delete it, and it expires; others' files do not wait for that."""
    log.warning("%s is damaged: %s", state, cause)
    content = state.with_suffix(".data")
    made_at = int(state.stat().st_mtime)
    return FileObject(
        id=state.stem,
        bytes=content.stat().st_size if content.exists() else 0,
        created_at=made_at,
        expires_at=made_at + KEPT_S,
        filename=content.name,
        purpose="batch_output",
        status="error",
        status_details="the description of this file is damaged; its content may be whole",
    )


def _no_such_file(file_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"no such file: {file_id[:100]!r}", param="id", status=404, code="not_found"
    )
