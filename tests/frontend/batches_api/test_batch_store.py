"""What is on the disk when processes end at the worst moments, and what several of them see."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from diptych_frontend.batches_api import batch_store, states
from diptych_frontend.batches_api.api_types import KEPT_S, WINDOW_S, BatchRequest, FileObject
from diptych_frontend.batches_api.batch_store import BatchStore
from diptych_frontend.batches_api.file_store import FileStore
from diptych_frontend.batches_api.folder import Folder, new_id, synced, write_whole
from diptych_frontend.batches_api.journal import DONE, ERROR, Journal
from diptych_frontend.batches_api.states import Record
from diptych_protocol import InvalidRequestError

ANN = "ann"


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return new_store(tmp_path)


def new_store(root: Path) -> BatchStore:
    """As another process has it."""
    folder = Folder(root / "batches")
    return BatchStore(folder, FileStore(folder, 1 << 30))


def uploaded(store: BatchStore, content: bytes = b"{}\n", client: str = ANN) -> str:
    path = store.files.begin(client, len(content))
    path.write_bytes(content)

    def described(file_id: str, size: int) -> FileObject:
        now = int(time.time())
        return FileObject(
            id=file_id, bytes=size, created_at=now, expires_at=now + 3600, filename="f",
            purpose="batch",
        )  # fmt: skip

    return store.files.add(path, described).id


def begun(store: BatchStore, file_id: str) -> str:
    request = BatchRequest(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    return store.create(ANN, request).id


def claimed(store: BatchStore) -> tuple[Path, Record, Journal]:
    [state] = store.open_batches()
    found = store.claim(state)
    assert found is not None
    return state, *found


def answer(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id}).encode()


def test_one_process_works_on_a_batch_and_the_next_one_goes_on(
    store: BatchStore, tmp_path: Path
) -> None:
    begun(store, uploaded(store))
    state, record, journal = claimed(store)
    other = new_store(tmp_path)
    assert other.open_batches() == [state]
    assert other.claim(state) is None
    store.write(state, states.validated(record, 2, 1))
    journal.append(DONE, answer("a"))
    journal.close()
    _, record, journal = claimed(other)
    assert (record.batch.status, journal.done) == ("in_progress", {"a"})
    journal.close()


def test_any_process_may_wish_a_batch_to_end_and_only_its_runner_writes_it(
    store: BatchStore, tmp_path: Path
) -> None:
    batch_id = begun(store, uploaded(store))
    state, record, journal = claimed(store)
    assert new_store(tmp_path).cancel(ANN, batch_id).status == "cancelling"
    since = store.get(ANN, batch_id).cancelling_at
    store.write(state, states.validated(record, 2, 1))
    again = store.cancel(ANN, batch_id)
    assert (again.status, again.cancelling_at) == ("cancelling", since)
    journal.close()


class Crashed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", range(5))
def test_an_end_that_a_crash_cut_off_is_written_again(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before each thing that it writes: two files with their states, and the state of the batch."""
    batch_id = begun(store, uploaded(store))
    state, record, journal = claimed(store)
    record = states.finalizing(states.validated(record, 2, 1), 2)
    store.write(state, record)
    journal.append(DONE, answer("a"))
    journal.append(ERROR, answer("b"))
    writes = 0

    def crashing(real: Any) -> Any:
        def write(*arguments: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > step:
                raise Crashed
            return real(*arguments)

        return write

    with monkeypatch.context() as broken:
        broken.setattr(batch_store, "write_whole", crashing(write_whole))
        broken.setattr(batch_store, "synced", crashing(synced))
        with pytest.raises(Crashed):
            store.finish(state, record, journal, "completed", iter(()))
    journal.close()
    other = new_store(tmp_path)
    state, record, journal = claimed(other)
    assert states.next_end(record, time.time()) == "completed"
    other.finish(state, record, journal, "completed", iter(()))
    journal.close()
    batch = other.get(ANN, batch_id)
    assert batch.status == "completed"
    for file_id, custom_id in ((batch.output_file_id, "a"), (batch.error_file_id, "b")):
        assert file_id is not None
        with other.files.open(ANN, file_id) as file:
            assert file.read() == answer(custom_id) + b"\n"
    listed = other.files.page(ANN, after=None, limit=10, newest_first=False, purpose="batch_output")
    assert len(listed.data) == 2
    assert other.open_batches() == []


def test_a_batch_whose_marker_is_left_over_is_not_begun_again(
    store: BatchStore, tmp_path: Path
) -> None:
    batch_id = begun(store, uploaded(store))
    state, record, journal = claimed(store)
    store.write(state, states.failed(record, [], 1))
    journal.close()
    assert new_store(tmp_path).claim(state) is None
    assert store.open_batches() == []
    assert store.get(ANN, batch_id).status == "failed"
    assert not state.with_suffix(".results").exists()


def test_ids_sort_as_they_were_made() -> None:
    ids = []
    for _ in range(100):
        ids.append(new_id("file-"))
        time.sleep(1e-6)
    assert ids == sorted(ids)


def test_a_batch_that_was_never_written_is_forgotten_after_a_while(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(store, uploaded(store))
    [state] = store.open_batches()
    state.unlink()
    assert store.claim(state) is None
    assert store.open_batches() == [state], "its creator may be about to write it"
    later = time.time() + batch_store.LOST_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert store.claim(state) is None
    assert store.open_batches() == []


def test_a_file_that_a_batch_reads_stays(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = uploaded(store, b"content")
    begun(store, file_id)
    state, record, journal = claimed(store)
    with pytest.raises(InvalidRequestError) as caught:
        store.delete_file(ANN, file_id)
    assert (caught.value.status, caught.value.code) == (409, "file_in_use")
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    store.sweep()
    with store.input_of(record) as file:
        assert file.read() == b"content"
    store.finish(state, record, journal, "cancelled", iter(()))
    journal.close()
    store.sweep()
    with pytest.raises(InvalidRequestError):
        store.input_of(record)


def test_batches_are_few_and_the_oldest_are_forgotten(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_OPEN", 1)
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 2)
    file_id = uploaded(store)
    made = []
    for _ in range(3):
        made.append(begun(store, file_id))
        with pytest.raises(InvalidRequestError) as caught:
            begun(store, file_id)
        assert (caught.value.status, caught.value.code) == (429, "too_many_batches")
        state, record, journal = claimed(store)
        store.finish(state, record, journal, "cancelled", iter(()))
        journal.close()
    page = store.page(ANN, after=None, limit=10)
    assert [batch.id for batch in page.data] == made[:0:-1]


def test_ended_batches_are_kept_for_a_while(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = uploaded(store)
    ended_id = begun(store, file_id)
    state, record, journal = claimed(store)
    store.finish(state, record, journal, "cancelled", iter(()))
    journal.close()
    open_id = begun(store, file_id)
    now = time.time()
    for days, kept in ((KEPT_S, {ended_id, open_id}), (KEPT_S + WINDOW_S + 60, {open_id})):
        monkeypatch.setattr(time, "time", lambda days=days: now + days)
        store.sweep()
        assert {batch.id for batch in store.page(ANN, after=None, limit=9).data} == kept


def test_files_of_answers_are_no_input(store: BatchStore) -> None:
    begun(store, uploaded(store))
    state, record, journal = claimed(store)
    journal.append(DONE, answer("a"))
    store.finish(state, record, journal, "cancelled", iter(()))
    journal.close()
    with pytest.raises(InvalidRequestError, match="purpose"):
        begun(store, record.output_id)


def test_a_directory_that_cannot_be_written_to_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match="cannot be written to"):
        Folder(tmp_path / "file" / "batches")


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff"])
def test_a_damaged_state_stands_in_the_way_of_nothing_else(
    store: BatchStore, tmp_path: Path, content: bytes
) -> None:
    damaged, whole, of_bob = uploaded(store), uploaded(store), uploaded(store, client="bob")
    lost, kept = begun(store, whole), begun(store, whole)
    state_of = {path.stem: path for path in tmp_path.rglob("*.json")}
    for each in (damaged, lost, of_bob):
        state_of[each].write_bytes(content)
    listed = store.files.page(ANN, after=None, limit=9, newest_first=False, purpose=None).data
    assert [(file.id, file.status) for file in listed] == [(damaged, "error"), (whole, "processed")]
    assert [batch.id for batch in store.page(ANN, after=None, limit=9).data] == [kept]
    with pytest.raises(InvalidRequestError, match="no such batch"):
        store.cancel(ANN, lost)
    with pytest.raises(InvalidRequestError, match="has not ended"):
        store.delete_file(ANN, whole)
    store.delete_file(ANN, damaged)
    long_ago = time.time() - KEPT_S - 1
    os.utime(state_of[of_bob], (long_ago, long_ago))
    store.sweep()
    assert {path.stem for path in tmp_path.rglob("*.data")} == {whole}


@pytest.mark.parametrize(("there", "said"), [(b"{}", "2 of the 3"), (b"", "0 of"), (b"{}{}", "4")])
def test_a_file_that_has_lost_bytes_is_not_given_out_as_whole(
    store: BatchStore, tmp_path: Path, there: bytes, said: str
) -> None:
    whole, damaged = uploaded(store), uploaded(store)
    [content] = tmp_path.rglob(f"{damaged}.data")
    content.write_bytes(there)
    with pytest.raises(InvalidRequestError, match=f"the disk has {said}") as caught:
        store.files.open_whole(ANN, damaged)
    assert caught.value.status == 410
    file, size = store.files.open_whole(ANN, whole)
    with file:
        assert len(file.read()) == size == 3


def test_a_client_has_half_of_the_room_and_who_is_alone_has_all(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    files = FileStore(folder, 1000)
    store = BatchStore(folder, files)
    assert (files.room(ANN), files.room("")) == (500, 1000)
    uploaded(store, b"x" * 100, client="")
    assert files.room("") < 900
    assert files.room(ANN) == 500
