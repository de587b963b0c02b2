"""What is known of the answers of a batch after its process ended, however it did."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from diptych_frontend.batches_api.journal import DONE, ERROR, Journal


def opened(path: Path) -> Journal:
    journal = Journal.claim(path)
    assert journal is not None
    return journal


def result(custom_id: str) -> bytes:
    return b'{"custom_id":"%s","response":{}}' % custom_id.encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with two answers."""
    path = tmp_path / "b.results"
    journal = opened(path)
    journal.append(DONE, result("a"))
    journal.append(ERROR, result("b"))
    journal.close()
    return path


def test_answers_are_there_again(path: Path) -> None:
    journal = opened(path)
    assert (journal.done, journal.completed, journal.failed) == ({"a", "b"}, 1, 1)
    journal.append(DONE, result("c"))
    assert list(journal.parts(DONE)) == [result("a") + b"\n", result("c") + b"\n"]
    assert list(journal.parts(ERROR)) == [result("b") + b"\n"]
    journal.close()


@pytest.mark.parametrize("torn", [b"+", b'+{"custom_id":"c"', b"\0\0\0", b"\0\0\n", b"+{}\n"])
def test_what_a_crash_cut_off_never_was(path: Path, torn: bytes) -> None:
    with path.open("ab") as file:
        file.write(torn)
    journal = opened(path)
    assert journal.done == {"a", "b"}
    journal.append(DONE, result("c"))
    journal.close()
    assert path.read_bytes().splitlines()[2:] == [b"+" + result("c")]


def test_one_process_has_it_at_a_time(path: Path) -> None:
    journal = opened(path)
    assert Journal.claim(path) is None
    journal.close()
    opened(path).close()


def test_an_answer_that_does_not_fit_on_the_disk_was_not_added(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(path)
    written: list[int] = []

    def half(descriptor: int, data: Any, offset: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, "full")
        written.append(real(descriptor, data[: len(data) // 2], offset))
        return written[0]

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="full"):
        journal.append(DONE, result("long" * 20))
    monkeypatch.undo()
    assert "long" not in journal.done
    journal.append(DONE, result("c"))
    assert list(journal.parts(DONE)) == [result("a") + b"\n", result("c") + b"\n"]
    journal.close()
    assert opened(path).done == {"a", "b", "c"}


def test_who_reads_is_not_told_of_what_is_added_meanwhile(path: Path) -> None:
    journal = opened(path)
    reading = journal.parts(DONE)
    assert next(reading) == result("a") + b"\n"
    journal.append(DONE, result("c"))
    assert list(reading) == []
    journal.close()
