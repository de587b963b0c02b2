"""The records of a router's newest requests. The writer of a record finds its own here; anybody may
read any.

The records are bounded. The candidates of choices take most of the memory, so they are dropped
before the rest. There is no I/O here: the caller passes times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Final

from diptych_protocol import EngineCoreRequest, RequestJourneyEvent
from diptych_router.choosing.policy import Decision
from diptych_router.requests.request_record import (
    MOST_TEXT,
    Attempt,
    Placement,
    RequestRecord,
    Trace,
)

MOST_REQUESTS: Final = 4096
MOST_BYTES: Final = 32 << 20
"""The most memory for candidates of choices; the oldest are dropped first."""
MOST_ATTEMPTS: Final = 16
"""The most attempts of one request that are kept, the first ones."""
MOST_PLACEMENTS: Final = 2 * MOST_ATTEMPTS
"""The most placements of one request that are kept, the first ones."""
MOST_CHARACTERS: Final = 256
"""A client's id is cut to this length."""


class Records:
    """The newest requests of one router, in the order of their arrival."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES) -> None:
        self.most_requests, self._most_bytes = most_requests, most_bytes
        self.by_id: OrderedDict[str, RequestRecord] = OrderedDict()
        """By the router's own id."""
        self._heavy: OrderedDict[str, RequestRecord] = OrderedDict()
        """Those of them that have what was weighed, in the order of their first choice."""
        self._placements: dict[str, Placement] = {}
        """By the ids by which engines know them."""
        self._traced: list[RequestRecord] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[RequestRecord]:
        """The records, the newest first."""
        return reversed(self.by_id.values())

    def take_traced(self) -> list[RequestRecord]:
        """Return the requests that have ended since the last call, and whose spans are wanted."""
        taken, self._traced = self._traced, []
        return taken

    # --- what the request table writes --------------------------------------------------------

    def begin(
        self, request: EngineCoreRequest, now_s: float, trace: Trace | None = None
    ) -> RequestRecord:
        record = record_of(request, now_s, trace)
        self.by_id[record.request_id] = record
        if len(self.by_id) > self.most_requests:
            self._forget_oldest()
        return record

    def chose(
        self,
        record: RequestRecord,
        decision: Decision,
        facts: dict[str, Any],
        output_tokens: float,
        now_s: float,
    ) -> None:
        """Record the choice of engines for an attempt."""
        is_kept = len(record.attempts) < MOST_ATTEMPTS
        if decision.weighed and (not is_kept or record.is_forgotten):
            decision.weighed.clear()
        attempt = Attempt(now_s, decision, facts, output_tokens)
        record.newest, record.facts = attempt, facts
        record.num_attempts += 1
        record.pool = "prefill" if decision.prefill else "decode"
        if is_kept:
            record.attempts.append(attempt)
        if decision.weighed:
            for priced in decision.weighed:
                added = priced.num_bytes
                record.num_bytes += added
                self.num_bytes += added
            self._heavy[record.request_id] = record
            while self.num_bytes > self._most_bytes:
                self._lighten(next(iter(self._heavy.values())))

    def placed(
        self, record: RequestRecord, core_id: str, engine: str, name: str, now_s: float
    ) -> None:
        """Record that it goes to an engine, given by its key and its name for people."""
        placement = record.placement = Placement(core_id, engine, name, now_s)
        if record.newest is not None and record.num_placements < MOST_PLACEMENTS:
            record.num_placements += 1
            record.newest.placements.append(placement)
            if record.newest is record.attempts[-1]:  # nobody tells what engines say of later ones
                self._placements[core_id] = placement

    def told(self, engine: str, stations: Iterable[RequestJourneyEvent], now_s: float) -> None:
        """Record an engine's report of how far requests have come there. engine: its key."""
        for station in stations:
            placement = self._placements.get(station.request_id)
            if placement is not None and placement.engine == engine:
                placement.heard(station, now_s)

    def ended(
        self,
        record: RequestRecord,
        outcome: str,
        now_s: float,
        error: str = "",
        error_type: str = "",
    ) -> None:
        record.ended_s, record.outcome = now_s, outcome
        record.error, record.error_type = error[:MOST_TEXT], error_type
        if record.trace is not None:
            self._traced.append(record)
        if record.is_forgotten:
            self._forget_placements(record)

    # --- bounds -------------------------------------------------------------------------------

    def _forget_oldest(self) -> None:
        """Its engines are heard as long as it is open, because its spans are still to come."""
        _, oldest = self.by_id.popitem(last=False)
        oldest.is_forgotten = True
        self._lighten(oldest)
        if oldest.ended_s is not None:
            self._forget_placements(oldest)

    def _forget_placements(self, record: RequestRecord) -> None:
        for attempt in record.attempts:
            for placement in attempt.placements:
                self._placements.pop(placement.core_id, None)

    def _lighten(self, record: RequestRecord) -> None:
        """Forget what was weighed for a request."""
        if self._heavy.pop(record.request_id, None) is None:
            return
        self.num_bytes -= record.num_bytes
        record.num_bytes = 0
        for attempt in record.attempts:
            attempt.decision.weighed.clear()


def record_of(
    request: EngineCoreRequest, now_s: float, trace: Trace | None = None
) -> RequestRecord:
    return RequestRecord(
        request.request_id,
        request.shown_id[:MOST_CHARACTERS],
        request.tenant,
        len(request.prompt_token_ids or ()),
        request.pooling_params is not None or request.prefetches,
        now_s,
        trace,
    )
