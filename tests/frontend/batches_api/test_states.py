"""The life of a batch, without files."""

from __future__ import annotations

import pytest

from diptych_frontend.batches_api import states
from diptych_frontend.batches_api.api_types import (
    KEPT_S,
    WINDOW_S,
    BatchError,
    BatchRequest,
    BatchUsage,
    ExpiresAfter,
)
from diptych_frontend.batches_api.states import Record

REQUEST = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")


def made(request: BatchRequest = REQUEST) -> Record:
    return states.new_record(
        request, "ann", batch_id="batch_1", output_id="file-2", error_id="file-3", now=100
    )


def test_a_batch_that_succeeds() -> None:
    record = made()
    assert (record.batch.status, record.batch.expires_at) == ("validating", 100 + WINDOW_S)
    record = states.counted(states.validated(record, 3, 101), 2, 1, BatchUsage(7))
    assert (record.batch.status, record.batch.in_progress_at) == ("in_progress", 101)
    record = states.finalizing(record, 102)
    assert states.next_end(record, 102) == "completed"
    batch = states.ended(record, "completed", output=True, error=False, now=103).batch
    assert (batch.status, batch.completed_at, batch.finalizing_at) == ("completed", 103, 102)
    assert (batch.output_file_id, batch.error_file_id) == ("file-2", None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert batch.usage.input_tokens == 7


def test_a_batch_whose_input_is_wrong() -> None:
    batch = states.failed(made(), [BatchError("empty_file", "no")], 101).batch
    assert (batch.status, batch.failed_at) == ("failed", 101)
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data] == ["empty_file"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_batch_that_is_cancelled(begun: bool) -> None:
    record = states.validated(made(), 3, 101) if begun else made()
    record = states.cancelling(record, 102)
    assert (record.batch.status, record.batch.cancelling_at) == ("cancelling", 102)
    assert states.next_end(record, 102) == "cancelled"
    batch = states.ended(record, "cancelled", output=False, error=True, now=103).batch
    assert (batch.status, batch.cancelled_at, batch.error_file_id) == ("cancelled", 103, "file-3")


def test_who_is_done_is_not_cancelled_any_more() -> None:
    for record in (
        states.finalizing(made(), 101),
        states.ended(made(), "expired", output=False, error=False, now=101),
    ):
        assert states.cancelling(record, 102) is record


def test_a_batch_that_takes_too_long() -> None:
    record = states.validated(made(), 3, 101)
    assert states.next_end(record, 99 + WINDOW_S) is None
    assert states.next_end(record, 100 + WINDOW_S) == "expired"
    done = states.finalizing(record, 102)
    assert states.next_end(done, 100 + WINDOW_S) == "completed"


def test_files_are_kept_as_long_as_the_client_says() -> None:
    assert made().output_kept_s == KEPT_S
    request = BatchRequest(
        input_file_id="file-1",
        endpoint="/v1/completions",
        completion_window="24h",
        output_expires_after=ExpiresAfter("created_at", 3600),
    )
    assert made(request).output_kept_s == 3600
