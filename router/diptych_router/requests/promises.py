"""What a service promises to each request: whether it can be kept, and whether it was.

`spec.slo` promises a time to the first token, and a mean time for each token after it. A request
whose first token would be late is refused when it arrives, because it would use engines in vain and
delay others. docs/promises.md explains the rules. Both are read from the request's record; the
caller passes the time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from diptych_protocol import EngineOverloadedError, Slo, TenantOverloadedError
from diptych_protocol.admin import RECENT_S
from diptych_router.choosing.first_token import FirstToken
from diptych_router.engines.engine_table import Role
from diptych_router.requests.request_record import RequestRecord

MOST: Final = 0.95
"""The share of first tokens that come within the factor times the expected time."""
GAIN: Final = 0.1
"""How fast the factor changes. Its logarithm rises by this times `MOST` with a first token that is
later, and falls by this times the rest with one that is not."""
MOST_FACTOR: Final = 4.0
TELLING_PART: Final = 0.2
"""Only waits of at least this share of the promise teach, because shorter ones are seldom missed
and consist mostly of computing. As long as a wait that is too long when multiplied by `MOST_FACTOR`
is above that share, the factor can fall again."""


class Caution:
    """The caution of one router about one promise: which requests would miss it.

    What a router expects is exact only to the age of the engines' reports, to the step that is
    running, and to what other routers place meanwhile. Where requests just keep a promise, a small
    error decides. So predictions are multiplied by a learned factor: most first tokens come within
    the factor times the expected time.
    """

    def __init__(self, promised_s: float) -> None:
        self.promised_s = promised_s
        self.factor = 1.0

    def late_s(self, first: FirstToken, *, alone: bool = False) -> float:
        """Return by how much a request would miss the promise; at most 0 if it keeps it.

        A prompt that takes longer than the promise on an idle engine can never keep it. Then only
        the wait counts, so that it is served at some time. alone: if its tenant had no other
        request there.
        """
        wait_s = self.factor * (first.wait_for_others_s if alone else first.wait_s)
        own_s = self.factor * first.compute_s if self.is_possible(first) else 0.0
        return wait_s + own_s - self.promised_s

    def is_possible(self, first: FirstToken) -> bool:
        """Whether an idle engine would keep the promise."""
        return self.factor * first.compute_s <= self.promised_s

    def saw(self, first: FirstToken, took_s: float) -> None:
        """Learn from a first token that was predicted and has come."""
        expected_s = first.wait_s + first.compute_s
        if not TELLING_PART * self.promised_s <= expected_s <= self.promised_s:
            return
        late = took_s > self.factor * expected_s
        self.factor *= math.exp(GAIN * (MOST if late else MOST - 1.0))
        self.factor = min(max(self.factor, 1.0), MOST_FACTOR)


Promise = Literal["first_token", "inter_token"]
Outcome = Literal["kept", "missed", "refused"]

MOST_RETRY_S: Final = 60
"""The longest time after which a client is told to come back: all may be different then."""
SLOT_S: Final = RECENT_S / 12
"""Events within this many seconds are dropped together."""

What = TypeVar("What", bound=Hashable)


class Kind(NamedTuple):
    """The kinds of counts."""

    pool: Role
    """The pool that computed, or was to: the prompt for a first token, else the later tokens."""
    promise: Promise
    outcome: Outcome


class RecentCounts(Generic[What]):
    """Counts of the last `RECENT_S` seconds, exact to `SLOT_S`."""

    def __init__(self) -> None:
        self._slots = deque[tuple[int, Counter[What]]]()
        """Number of the slot, and what happened in it; the oldest first."""

    def add(self, what: What, now: float) -> None:
        slot = int(now / SLOT_S)
        if not self._slots or self._slots[-1][0] < slot:
            self._forget(slot)
            self._slots.append((slot, Counter()))
        self._slots[-1][1][what] += 1

    def total(self, now: float) -> Counter[What]:
        self._forget(int(now / SLOT_S))
        return sum((counts for _, counts in self._slots), Counter())

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - RECENT_S / SLOT_S:
            self._slots.popleft()


class Promises:
    """The promises of one service, and how often this router saw each kept."""

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self._caution = None if slo.ttft_ms is None else Caution(slo.ttft_ms / 1e3)
        self._inter_token_s = None if slo.inter_token_ms is None else slo.inter_token_ms / 1e3
        self.counts = Counter[Kind]()
        """Number of requests; several answers to one prompt count each."""
        self.recent = RecentCounts[Kind]()
        """The same of late, without what more engines could not change."""

    def refusal(
        self, record: RequestRecord, first: FirstToken, now: float
    ) -> EngineOverloadedError | None:
        """Return the error for a new request that would miss its deadline; None to serve it."""
        if self._caution is None or record.prefill_only:
            return None
        late_s = self._caution.late_s(first)
        if late_s <= 0:
            record.expected = first
            return None
        self._count(Kind(record.pool, "first_token", "refused"), now)
        if record.trial is not None:
            record.trial.counts.update(("requests", "late"))
        retry_s = min(MOST_RETRY_S, math.ceil(late_s))
        promised = f"promised within {self._caution.promised_s:g} s (slo.ttftMs)"
        what = f"the first token is {promised}, and would come {late_s:.2f} s later"
        if record.tenant and self._caution.late_s(first, alone=True) <= 0:
            return TenantOverloadedError(
                f"{what}, because of the other requests of this API key; retry in {retry_s} s",
                retry_after_s=retry_s,
            )
        return EngineOverloadedError(f"{what}; retry in {retry_s} s", retry_after_s=retry_s)

    def saw_first(self, record: RequestRecord, now: float) -> None:
        """Record that the first token of a request was delivered."""
        if record.trial is not None:
            promised_s = math.inf if self._caution is None else self._caution.promised_s
            record.trial.counts["requests"] += 1
            record.trial.counts["late"] += now - record.began_s > promised_s
        if self._caution is not None:
            took_s = now - record.began_s
            kept = took_s <= self._caution.promised_s
            if record.expected is not None and record.num_attempts == 1:
                self._caution.saw(record.expected, took_s)
            possible = record.expected is None or self._caution.is_possible(record.expected)
            kind = Kind(record.pool, "first_token", "kept" if kept else "missed")
            self._count(kind, now, of_load=kept or possible)

    def saw_end(self, record: RequestRecord, now: float) -> None:
        """Record that the last token of a request was delivered, or the last that anybody wants."""
        if record.trial is not None and record.first_token_s is None:
            record.trial.counts["requests"] += 1  # a pooled prompt has no token
        self._saw_gaps(record, now, record.tokens.total - 1)

    def saw_leave(self, record: RequestRecord, now: float) -> None:
        """Record that nobody wants more of a request. It is judged by what it has got: else the
        slower answers are, the more of them would never be counted."""
        if record.first_token_s is not None:
            waits = now - record.first_token_s > (self._inter_token_s or math.inf)
            self._saw_gaps(record, now, max(record.tokens.total - 1, int(waits)))
            return
        promised_s = math.inf if self._caution is None else self._caution.promised_s
        if now - record.began_s > promised_s and not record.prefill_only:
            self.saw_first(record, now)

    def _saw_gaps(self, record: RequestRecord, now: float, gaps: int) -> None:
        if record.trial is not None and record.first_token_s is not None and gaps > 0:
            each_s = math.inf if self._inter_token_s is None else self._inter_token_s
            record.trial.counts["ended"] += 1
            record.trial.counts["slow"] += now - record.first_token_s > each_s * gaps
            placement = record.placement  # at the newest engine
            received = placement is not None and placement.received_tokens > 0
            record.trial.counts["handed_over"] += received
        if self._inter_token_s is not None and record.first_token_s is not None and gaps > 0:
            kept = now - record.first_token_s <= self._inter_token_s * gaps
            self._count(Kind("decode", "inter_token", "kept" if kept else "missed"), now)

    def saw_failure(self, record: RequestRecord, now: float, *, of_load: bool) -> None:
        """Record that an accepted request ended with an error. of_load: because the engines had too
        much to do."""
        if record.first_token_s is not None:
            if self._inter_token_s is not None:
                self._count(Kind("decode", "inter_token", "missed"), now, of_load=of_load)
        elif self._caution is not None and not record.prefill_only:
            kind = Kind(record.pool, "first_token", "missed")
            self._count(kind, now, of_load=of_load)

    def _count(self, kind: Kind, now: float, *, of_load: bool = True) -> None:
        self.counts[kind] += 1
        if of_load:
            self.recent.add(kind, now)
