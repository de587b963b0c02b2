"""Records the events in each request's life.

The scheduler passes events to its log, if it has one. The log has the clock, so the scheduler needs
none.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from diptych_engine.scheduling.request import Request, RequestStatus, StepPlan, TokenOutput
from diptych_protocol import RequestJourneyEvent, RequestJourneyEventType

Station = RequestJourneyEventType

MAX_EVENTS = 10_000
"""Limit on the events that are kept for one client. If nobody takes them, the oldest are lost
first."""


@dataclass(slots=True)
class _Progress:
    """How far a request ever came, whatever it lost since."""

    prefill_done: int = 0
    preemptions: int = 0
    was_scheduled: bool = False
    has_token: bool = False


class JourneyLog:
    """Recorded events, by client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress: dict[str, _Progress] = {}
        self._events: defaultdict[bytes, deque[RequestJourneyEvent]] = defaultdict(_bounded)

    def record(self, request: Request, station: Station, step: int) -> None:
        """Record an event of a request, before the request loses any blocks because of it."""
        progress = self._progress.setdefault(request.request_id, _Progress())
        kind = status = None
        match station:
            case Station.SCHEDULED:
                kind = "RESUME" if progress.was_scheduled else "FIRST"
                progress.was_scheduled = True
            case Station.PREEMPTED:
                progress.preemptions += 1
            case Station.FINISHED:
                status = str(request.finish_reason)
                del self._progress[request.request_id]
        total = request.num_prompt_tokens
        computed = min(request.num_computed_tokens, total)
        progress.prefill_done = max(progress.prefill_done, computed)
        event = RequestJourneyEvent(
            request.request_id,
            station,
            self._clock(),
            step,
            progress.prefill_done,
            total,
            request.num_output_tokens,
            max(0, request.max_total_tokens - total),
            "DECODE" if request.num_output_tokens else "PREFILL",
            progress.preemptions,
            kind,
            status,
        )
        self._events[request.client].append(event)

    def saw_step(self, plan: StepPlan, outputs: list[TokenOutput], step: int) -> None:
        """Record what a step has computed: a part of a prompt that continues is an event, and so is
        the first token of each request."""
        for share in plan.scheduled:
            if share.samples:
                continue  # most shares are decodes
            request = share.request
            goes_on = share.start + share.num_tokens < request.num_prompt_tokens
            if goes_on and request.status is RequestStatus.RUNNING:
                self.record(request, Station.CHUNK, step)
        for made in outputs:
            progress = self._progress.get(made.request.request_id)
            if made.output.new_token_ids and progress is not None and not progress.has_token:
                progress.has_token = True
                self.record(made.request, Station.FIRST_TOKEN, step)

    def take(self) -> dict[bytes, list[RequestJourneyEvent]]:
        """Return the events since the last call, by client. A request that has finished gets its
        departure event here."""
        taken, self._events = self._events, defaultdict(_bounded)
        now = self._clock()
        return {client: _with_departures(events, now) for client, events in taken.items()}


def _bounded() -> deque[RequestJourneyEvent]:
    return deque(maxlen=MAX_EVENTS)


def _with_departures(events: deque[RequestJourneyEvent], now: float) -> list[RequestJourneyEvent]:
    departures = [
        msgspec.structs.replace(event, event_type=Station.DEPARTED, ts_monotonic=now)
        for event in events
        if event.event_type is Station.FINISHED
    ]
    return [*events, *departures]
