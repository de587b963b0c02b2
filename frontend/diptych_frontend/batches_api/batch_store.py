"""Stores batches: their states, and the files of their runners. Calls block on the disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec

from diptych_frontend.batches_api import states
from diptych_frontend.batches_api.api_types import (
    KEPT_S,
    Batch,
    BatchList,
    BatchRequest,
    FileObject,
)
from diptych_frontend.batches_api.file_store import FileStore, page_of
from diptych_frontend.batches_api.folder import Folder, ids_in, is_id, new_id, synced, write_whole
from diptych_frontend.batches_api.journal import DONE, ERROR, Journal
from diptych_frontend.batches_api.states import ENDED, End, Record
from diptych_protocol import UNREADABLE, InvalidRequestError

MAX_BATCHES: Final = 1000
"""The most batches of a client. Beyond it, the oldest that have ended are removed."""
MAX_OPEN: Final = 50
"""The most batches of a client that have not ended."""
LOST_S: Final = 60
"""A batch without a state after this time will never have one."""


class BatchStore:
    """The batches in a folder, and the files that they read and write."""

    def __init__(self, folder: Folder, files: FileStore) -> None:
        self._folder = folder
        self.files = files

    # --- what clients do ----------------------------------------------------------------------

    def create(self, client: str, request: BatchRequest) -> Batch:
        """Create a batch. Raises `InvalidRequestError` if that is not possible."""
        try:
            read = self.files.get(client, request.input_file_id)
        except InvalidRequestError as exc:
            raise InvalidRequestError(str(exc), param="input_file_id") from None
        if read.purpose != "batch":
            raise InvalidRequestError(
                "the file must have been uploaded with the purpose 'batch'", param="input_file_id"
            )
        self._folder.prepare(client)
        self._make_room(client)
        record = states.new_record(
            request,
            client,
            batch_id=new_id("batch_"),
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            now=int(time.time()),
        )
        state = self._folder.batches(client) / f"{record.batch.id}.json"
        # In this order: a batch that nobody looks at would never end.
        self._folder.mark_open(client, record.batch.id)
        self.write(state, record)
        return record.batch

    def get(self, client: str, batch_id: str) -> Batch:
        """Return the state of a batch. Raises `InvalidRequestError` if it does not exist."""
        if is_id(batch_id, "batch_"):
            record = self._whole(self._folder.batches(client) / f"{batch_id}.json")
            if record is not None:
                return record.batch
        raise InvalidRequestError(
            f"no such batch: {batch_id[:100]!r}", param="batch_id", status=404, code="not_found"
        )

    def page(self, client: str, *, after: str | None, limit: int) -> BatchList:
        """Return the batches of a client, the newest first."""
        folder = self._folder.batches(client)
        ids = page_of(ids_in(folder), after, newest_first=True)
        records = [self._whole(folder / f"{batch_id}.json") for batch_id in ids[: limit + 1]]
        data = [record.batch for record in records[:limit] if record is not None]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return BatchList(data, first, last, len(ids) > limit)

    def cancel(self, client: str, batch_id: str) -> Batch:
        """Request a batch's end. Raises `InvalidRequestError` if it has ended or is not there."""
        batch = self.get(client, batch_id)
        if batch.status in ENDED or batch.status == "finalizing":
            raise InvalidRequestError(
                f"a batch with the status {batch.status!r} cannot be cancelled", status=409
            )
        wish = self._folder.batches(client) / f"{batch_id}.cancel"
        if not wish.exists():
            write_whole(wish, b"")
        return self.get(client, batch_id)

    def delete_file(self, client: str, file_id: str) -> None:
        """Delete a file. Raises `InvalidRequestError` if a batch needs it, or it does not exist."""
        self.files.get(client, file_id)
        if file_id in self._used(self._folder.batches(client)):
            raise InvalidRequestError(
                "a batch that has not ended reads this file; cancel it, or wait for its end",
                param="id",
                status=409,
                code="file_in_use",
            )
        self.files.delete(client, file_id)

    # --- what runners do ----------------------------------------------------------------------

    def open_batches(self) -> list[Path]:
        """Return the states of the batches that have not ended, the oldest first."""
        return self._folder.open_batches()

    def claim(self, state: Path) -> tuple[Record, Journal] | None:
        """Lock a batch to process it. None: another process has it, or nothing is left to do."""
        if not state.exists():
            # Whoever creates it marks it first.
            with contextlib.suppress(FileNotFoundError):
                self._forget_if_lost(state)
            return None
        journal = Journal.claim(state.with_suffix(".results"))
        if journal is None:
            return None
        try:
            record = self.read(state)  # only now: the last one who had the lock may have ended it
            if record is not None and record.batch.status not in ENDED:
                return record, journal
            self.close(state)
        except BaseException:
            journal.close()
            raise
        journal.close()
        return None

    def read(self, state: Path) -> Record | None:
        """Return a batch, with its client's request to cancel it; None if it does not exist."""
        try:
            record = msgspec.json.decode(state.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        with contextlib.suppress(FileNotFoundError):
            wish = state.with_suffix(".cancel").stat()
            return states.cancelling(record, int(wish.st_mtime))
        return record

    def _whole(self, state: Path) -> Record | None:
        """As `read`, but a state that is damaged is none: others do not wait for it. Its runner
        says so in the log, and goes on once it is mended."""
        try:
            return self.read(state)
        except UNREADABLE:
            return None

    def write(self, state: Path, record: Record) -> None:
        """Write the state. Only the holder of the batch's lock may call this."""
        write_whole(state, msgspec.json.encode(record))

    def input_of(self, record: Record) -> BinaryIO:
        """Return a batch's input, even if it expired. Raises `InvalidRequestError` if deleted."""
        return self.files.open(record.client, record.batch.input_file_id)

    def finish(
        self, state: Path, record: Record, journal: Journal, end: End, undone: Iterable[bytes]
    ) -> Record:
        """Write the files of a batch and its final state. It can be repeated after a crash.

        undone: further lines of the error file.
        """
        folder = self._folder.files(record.client)
        now = int(time.time())
        has: dict[bytes, bool] = {}
        failed = journal.failed

        def lines(sign: bytes) -> Iterator[bytes]:
            nonlocal failed
            yield from journal.parts(sign)
            for line in undone if sign == ERROR else ():
                failed += 1
                yield line

        kinds: tuple[tuple[bytes, str, Literal["output", "error"]], ...] = (
            (DONE, record.output_id, "output"),
            (ERROR, record.error_id, "error"),
        )
        for sign, file_id, name in kinds:
            content = folder / f"{file_id}.data"
            size = synced(content, lines(sign))
            has[sign] = size > 0
            if not size:
                content.unlink()
                continue
            made = FileObject(
                id=file_id,
                bytes=size,
                created_at=now,
                expires_at=now + record.output_kept_s,
                filename=f"{record.batch.id}_{name}.jsonl",
                purpose="batch_output",
            )
            write_whole(content.with_suffix(".json"), msgspec.json.encode(made))
        counted = states.counted(record, journal.completed, failed, journal.usage)
        ended = states.ended(counted, end, output=has[DONE], error=has[ERROR], now=now)
        self.write(state, ended)
        self.close(state)
        return ended

    def close(self, state: Path) -> None:
        """Remove what a batch that has ended no longer needs."""
        state.with_suffix(".results").unlink(missing_ok=True)
        state.with_suffix(".cancel").unlink(missing_ok=True)
        self._folder.unmark(state)

    # --- tidying up ---------------------------------------------------------------------------

    def sweep(self) -> None:
        """Delete what has expired, of all clients."""
        for client in self._folder.clients():
            self.files.sweep(client, self._used(client / "batches"))
            for batch_id in ids_in(client / "batches"):
                state = client / "batches" / f"{batch_id}.json"
                record = self._whole(state)
                if record is None or record.batch.status not in ENDED:
                    continue
                if time.time() - record.batch.expires_at > KEPT_S:
                    self.close(state)
                    state.unlink(missing_ok=True)

    def _make_room(self, client: str) -> None:
        """Forget the oldest batch of a client that has too many. Raises `InvalidRequestError` if
        too many have not ended."""
        folder = self._folder.batches(client)
        if len(self._open_of(folder)) >= MAX_OPEN:
            raise InvalidRequestError(
                f"{MAX_OPEN} batches of this client have not ended; wait for one, or cancel it",
                status=429,
                code="too_many_batches",
            )
        ids = ids_in(folder)
        for batch_id in ids if len(ids) >= MAX_BATCHES else ():
            state = folder / f"{batch_id}.json"
            record = self._whole(state)
            if record is not None and record.batch.status in ENDED:
                state.unlink(missing_ok=True)
                return

    def _open_of(self, folder: Path) -> list[Path]:
        return [state for state in self._folder.open_batches() if state.parent == folder]

    def _used(self, folder: Path) -> set[str]:
        """The files that the batches of a folder still read or write."""
        used: set[str] = set()
        for state in self._open_of(folder):
            record = self._whole(state)
            if record is not None and record.batch.status not in ENDED:
                used |= {record.batch.input_file_id, record.output_id, record.error_id}
        return used

    def _forget_if_lost(self, state: Path) -> None:
        # The beginning of an id is the time when it was made, in milliseconds.
        made_at = int(state.stem.removeprefix("batch_")[:12], 16) / 1000
        if time.time() - made_at > LOST_S:
            self._folder.unmark(state)
