"""The events in a request's life, as the scheduler reports them."""

from __future__ import annotations

import enum

import msgspec


class RequestJourneyEventType(enum.IntEnum):
    """The kinds of events. The values from 7 on are ours."""

    QUEUED = 1
    SCHEDULED = 2
    FIRST_TOKEN = 3
    PREEMPTED = 4
    FINISHED = 5
    DEPARTED = 6
    """Its last output was sent."""
    KV_WAIT = 7
    """It waits for blocks from another engine."""
    KV_DONE = 8
    KV_FAIL = 9
    CHUNK = 10
    """A step has computed a part of its prompt, and more follows."""


class RequestJourneyEvent(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """One event, with the progress of the request."""

    request_id: str
    event_type: RequestJourneyEventType
    ts_monotonic: float
    """`time.monotonic()` of the core."""
    scheduler_step: int | None = None
    prefill_done_tokens: int = 0
    """The most prompt tokens that were ever computed; a preemption does not lower it."""
    prefill_total_tokens: int = 0
    decode_done_tokens: int = 0
    decode_max_tokens: int = 0
    phase: str = "PREFILL"
    """PREFILL or DECODE."""
    num_preemptions_so_far: int = 0
    schedule_kind: str | None = None
    """FIRST or RESUME, for SCHEDULED."""
    finish_status: str | None = None
    """One of FINISH_REASON_STRINGS, for FINISHED."""
