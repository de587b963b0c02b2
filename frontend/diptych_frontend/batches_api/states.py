"""The life of a batch: a state machine on values, without files or a clock.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │              │
        ├──▶ failed    ├──▶ cancelling ──▶ cancelled
        │              └──▶ expired
        └──▶ cancelling, expired

`cancelling` is the client's request, which is stored beside the state, so that only one process
writes the state itself.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from diptych_frontend.batches_api.api_types import (
    KEPT_S,
    WINDOW_S,
    Batch,
    BatchError,
    BatchErrors,
    BatchRequest,
    BatchUsage,
    RequestCounts,
    Status,
)

ENDED: Final[frozenset[Status]] = frozenset({"failed", "completed", "expired", "cancelled"})
End = Literal["completed", "expired", "cancelled"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in its stored form."""

    batch: Batch
    client: str
    """The name of the API key that it belongs to; empty without keys."""
    output_id: str
    error_id: str
    """The ids of its future files, so that they are not made twice."""
    output_kept_s: int = KEPT_S


def new_record(
    request: BatchRequest, client: str, *, batch_id: str, output_id: str, error_id: str, now: int
) -> Record:
    """Return a batch that a client has just requested."""
    kept = request.output_expires_after
    return Record(
        batch=Batch(
            id=batch_id,
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=request.metadata,
        ),
        client=client,
        output_id=output_id,
        error_id=error_id,
        output_kept_s=KEPT_S if kept is None else kept.seconds,
    )


def _with(record: Record, **changes: object) -> Record:
    return replace(record, batch=replace(record.batch, **changes))


def validated(record: Record, total: int, now: int) -> Record:
    """Record that its input is valid and has this many lines."""
    counts = RequestCounts(total=total)
    return _with(record, status="in_progress", in_progress_at=now, request_counts=counts)


def failed(record: Record, errors: list[BatchError], now: int) -> Record:
    """Record that its input is invalid. The batch has ended."""
    return _with(record, status="failed", failed_at=now, errors=BatchErrors(errors))


def counted(record: Record, completed: int, failed: int, usage: BatchUsage) -> Record:
    """Record how many of its lines have ended, and how many tokens they took."""
    counts = RequestCounts(record.batch.request_counts.total, completed, failed)
    return _with(record, request_counts=counts, usage=usage)


def cancelling(record: Record, since: int) -> Record:
    """Record that its client has cancelled it. A batch that is at its end stays as it is."""
    if record.batch.status not in ("validating", "in_progress"):
        return record
    return _with(record, status="cancelling", cancelling_at=since)


def finalizing(record: Record, now: int) -> Record:
    """Record that all of its lines have ended."""
    return _with(record, status="finalizing", finalizing_at=now)


def ended(record: Record, end: End, *, output: bool, error: bool, now: int) -> Record:
    """Record that its files exist, if they are not empty."""
    changes: dict[str, object] = {
        "status": end,
        f"{end}_at": now,
        "output_file_id": record.output_id if output else None,
        "error_file_id": record.error_id if error else None,
    }
    return _with(record, **changes)


def next_end(record: Record, now: float) -> End | None:
    """Return the state in which it has to end, whatever lines are left; None to continue."""
    status = record.batch.status
    if status == "cancelling":
        return "cancelled"
    if status == "finalizing":
        return "completed"
    return "expired" if now >= record.batch.expires_at else None
