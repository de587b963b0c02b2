"""What happened to a request, from its arrival to its end.

    attempt 1: placement at prefill ─▶ placement at decode ─┐ (a failure, or an engine that drains)
    attempt 2: placement at prefill ─▶ ...      ◀───────────┘

The request table writes a record when it decides something, and adds the events that engines
report. Spans, explanations, timelines, predictions and promises are read from it. Nothing else
tracks a request. There is no I/O here: times are seconds of the router's clock.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np

from diptych_frontend.observability.metrics import Times
from diptych_protocol import EngineCoreOutput, EngineCoreRequest, RequestJourneyEvent
from diptych_protocol import RequestJourneyEventType as Station
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policy import FETCH, READ, Decision
from diptych_router.engines.block_holders import Keys
from diptych_router.engines.engine_table import ROLES, Role
from diptych_router.engines.serving import RevisionShare

MOST_STATIONS: Final = 40
"""The most events of a request at one engine that are kept. If a prompt has more parts, the newest
part replaces the one before it; then parts look longer than they were."""
MOST_MARKS: Final = 64
"""The most times of tokens that are kept for a request."""
PARTS: Final = 4
"""How many numbers an event has."""
DOUBLINGS: Final = 10
KEPT_COUNTS: Final = np.array(
    [*range(1, 16), *(n << doubling for doubling in range(1, DOUBLINGS + 1) for n in range(8, 16))]
)
"""Numbers of blocks: the first 15, and eight of each doubling after that. So of n blocks with which
two prompts begin, more than 8/9 are among these."""
IS_KEPT: Final = np.zeros(KEPT_COUNTS[-1], np.bool_)
"""Whether the key of the first block of a prompt is kept, of the second, ..."""
IS_KEPT[KEPT_COUNTS - 1] = True


class Placement:
    """A request at one engine."""

    __slots__ = (
        "_lag_s", "_told", "cached_tokens", "core_id", "engine", "first_tokens", "first_word_s",
        "name", "num_tokens", "pinned_tokens", "received_tokens", "sent_s",
    )  # fmt: skip

    def __init__(self, core_id: str, engine: str, name: str, sent_s: float) -> None:
        """core_id: the engine's id of the request. engine: its key. name: its name for people."""
        self.core_id, self.engine, self.name, self.sent_s = core_id, engine, name, sent_s
        self.first_word_s: float | None = None
        self.cached_tokens = self.pinned_tokens = self.received_tokens = 0
        self.first_tokens = 0
        """How many tokens its first word brought."""
        self.num_tokens = 0
        self._told: array[float] | None = None
        """Each station's type, the engine's time, how far the prompt was, and how often the request
        was preempted, one after the other; None: it tells nothing."""
        self._lag_s = math.inf
        """The router's clock less the engine's: the least that was seen, so it contains the
        shortest time that a message took."""

    def heard(self, station: RequestJourneyEvent, now_s: float) -> None:
        """Record an event that the engine reports. An impossible one is dropped."""
        time_s, kind = station.ts_monotonic, station.event_type
        if not math.isfinite(time_s) or kind in (Station.DEPARTED, Station.OTHER):
            return
        if self._told is None:
            self._told = array("d")
        told = self._told
        if len(told) == PARTS * MOST_STATIONS:
            if kind is Station.CHUNK and told[-PARTS] != kind:
                return
            del told[-PARTS:]
        self._lag_s = min(self._lag_s, now_s - time_s)
        told.extend((kind, time_s, station.prefill_done_tokens, station.num_preemptions_so_far))

    def stations(self) -> Iterator[tuple[Station, float, int, int]]:
        """Return each event with its time by the router's clock, the progress of the prompt, and
        the number of preemptions."""
        told = self._told or ()
        for kind, time_s, tokens, preemptions in zip(
            *(told[part::PARTS] for part in range(PARTS)), strict=True
        ):
            at_s = max(self.sent_s, time_s + self._lag_s)
            yield Station(int(kind)), at_s, int(tokens), int(preemptions)


class TokenTimes:
    """When tokens came: all of them if there are few, otherwise every second, fourth, ..."""

    __slots__ = ("_next", "_stride", "marks", "total")

    def __init__(self) -> None:
        self.marks = array("d")
        """A time, how many tokens there were then, the next time, ..."""
        self.total = 0
        self._stride = self._next = 1

    def came(self, num_tokens: int, now_s: float) -> None:
        """Record this many more tokens."""
        self.total += num_tokens
        if self.total < self._next:
            return
        if len(self.marks) == 2 * MOST_MARKS:  # forget every second one
            kept = zip(self.marks[::4], self.marks[1::4], strict=True)
            self.marks = array("d", chain.from_iterable(kept))
            self._stride *= 2
        self.marks.extend((now_s, self.total))
        self._next = self.total + self._stride


MOST_TEXT: Final = 1024
"""A reason and an error are cut to this length."""


class Setback(enum.Enum):
    """Why a request needs a new attempt."""

    ERROR = enum.auto()
    """An engine reports that it failed with it."""
    LOSS = enum.auto()
    """The engine vanished, gave the request up, or could not take it over."""
    FULL = enum.auto()
    """The engine has no room for it now. If none has, the client has to come back later."""
    LATE = enum.auto()
    """The engine missed the deadline of its first token."""
    MOVE = enum.auto()
    """Its engine is draining. That is nobody's fault and not counted."""
    REFUSED = enum.auto()
    """The engine reports that the request is invalid, as any other engine would."""


class Trace(Protocol):
    """The trace of a request whose spans are wanted."""

    def headers(self, core_id: str) -> dict[str, str]:
        """Return the headers that make an engine's span a child of the span of this placement."""


class Tracer(Protocol):
    """Who sends the spans of requests."""

    def begin(self, request: EngineCoreRequest, now_s: float) -> Trace | None:
        """Return the trace of a new request; None if nobody wants its spans."""

    def send(self, record: RequestRecord) -> None:
        """Send the spans of a request that has ended, and forget its trace."""

    def close(self) -> None:
        """Send what is left, within a few seconds. It may block that long."""


@dataclass(slots=True)
class Attempt:
    """A choice of engines, and its outcome."""

    began_s: float
    decision: Decision
    """Without `weighed` once that is dropped."""
    facts: dict[str, Any]
    """Facts for the response headers."""
    output_tokens: float
    """How many tokens the answer was expected to have."""
    placements: list[Placement] = field(default_factory=list)
    setback: Setback | None = None
    """Why it ended early."""
    why: str = ""
    ended_s: float | None = None
    """When the setback came."""
    again: bool = False
    """Whether the request needed engines again after the setback."""

    @property
    def prefill(self) -> str:
        """The name of the engine that computes the prompt; empty if the one that decodes does."""
        return str(self.facts["prefill"]) if self.decision.prefill else ""

    @property
    def decode(self) -> str:
        """The name of the engine that was chosen to decode."""
        return str(self.facts["decode"])

    @property
    def decoding(self) -> list[Placement]:
        """Its placements at engines that decode, if they have brought any output."""
        those = self.placements[1:] if self.decision.prefill else self.placements
        return [placement for placement in those if placement.first_word_s is not None]

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the choice to the first output."""
        if not self.placements or self.placements[0].first_word_s is None:
            return None
        return self.placements[0].first_word_s - self.began_s

    @property
    def hand_off_s(self) -> float | None:
        """Seconds from the first output of the prefill engine to that of the decode engine."""
        if not self.decision.prefill or len(self.placements) < 2:
            return None
        first, second = self.placements[0].first_word_s, self.placements[1].first_word_s
        return None if first is None or second is None else second - first

    @property
    def first_token_expected_s(self) -> float | None:
        """The expected seconds; None if the policy gives none."""
        terms = self.decision.terms
        if "wait_s" not in terms:
            return None
        return terms["wait_s"] + terms["compute_s"] + terms.get(FETCH, 0.0) + terms.get(READ, 0.0)

    @property
    def hand_off_expected_s(self) -> float | None:
        """The expected seconds, with the next step of decode; None if that is not predicted."""
        terms = self.decision.terms
        if "transfer_s" not in terms or self.output_tokens <= 0:
            return None
        return terms["transfer_s"] + terms["steps_s"] / self.output_tokens


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Of its prompt only the number of tokens is kept, and some keys
    of what it begins with."""

    request_id: str
    """The router's own."""
    shown_id: str
    """The client's."""
    tenant: str
    prompt_tokens: int
    prefill_only: bool
    """Whether nothing is decoded, because its prompt is pooled, or only brought."""
    began_s: float
    trace: Trace | None = None
    """None if nobody wants spans, or they have been sent."""
    attempts: list[Attempt] = field(default_factory=list)
    """The first attempts; `Records` limits their number."""
    num_attempts: int = 0
    newest: Attempt | None = None
    """The newest attempt, even if it is not among those that are kept."""
    placement: Placement | None = None
    """The newest placement, even if it is not among those that are kept."""
    num_placements: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """The facts of the newest attempt."""
    pool: Role = "prefill"
    """The pool that computes its prompt, or was to compute it."""
    block_size: int = 0
    """Tokens of the blocks that `keys` are of."""
    keys: Keys | None = None
    """Those of its n-th blocks, for each n of `KEPT_COUNTS`; None: they are not known."""
    revisions: tuple[str, ...] = ()
    """The revisions that it was given to while one is tried; empty: none was."""
    trial: RevisionShare | None = None
    """Counts it, if it was given to the revision on trial."""
    expected: FirstToken | None = None
    """The prediction of its first token when it was accepted; None without a prediction."""
    first_token_s: float | None = None
    tokens: TokenTimes = field(default_factory=TokenTimes)
    ended_s: float | None = None
    outcome: str = ""
    """Why it finished; error if it failed, refused if it was never accepted."""
    error: str = ""
    error_type: str = ""
    num_bytes: int = 0
    """The memory of its candidates."""
    is_forgotten: bool = False
    """Whether nobody finds it any more, because there are so many newer requests."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for engines, or did when it ended."""
        return self.newest is None or self.newest.again

    def tries(self) -> Iterator[tuple[float, str, Attempt | None]]:
        """For each time that it needed engines: when, why, and the attempt that followed."""
        asked_s, why = self.began_s, ""
        for attempt in self.attempts:
            yield asked_s, why, attempt
            asked_s, why = attempt.ended_s or asked_s, attempt.why
        if self.is_waiting and self.num_attempts == len(self.attempts):
            yield asked_s, why, None

    def brought(self, output: EngineCoreOutput, now_s: float, predictions: Predictions) -> bool:
        """Record an output of the engine in charge; True if it has the request's first token.
        predictions: compared with the first output of each engine."""
        placement, num_tokens = self.placement, len(output.new_token_ids)
        if placement is not None:
            if placement.first_word_s is None:
                placement.first_word_s, placement.first_tokens = now_s, num_tokens
                placement.cached_tokens = output.num_cached_tokens
                placement.pinned_tokens = output.num_pinned_tokens
                placement.received_tokens = output.num_received_tokens
                if not self.prefill_only or output.pooling_output is not None:  # no prefetch
                    predictions.saw_word(self)
            placement.num_tokens += num_tokens
        if not num_tokens:
            return False
        self.tokens.came(num_tokens, now_s)
        if self.first_token_s is not None:
            return False
        self.first_token_s = now_s
        return True

    def went_wrong(self, *, ended: bool) -> None:
        """Count an engine's failure against the revision on trial, if it is one of that. ended: the
        request has failed with it. What no engine was given, because there was none or its tenant
        has too much there, says nothing of a revision."""
        if self.trial is not None and self.num_attempts:
            self.trial.counts["failed"] += 1
            self.trial.counts["requests"] += ended and self.first_token_s is None

    def set_back(self, setback: Setback, why: str, again: bool, now_s: float) -> None:
        """Record that the newest attempt ended early. again: the request needs engines again."""
        attempt = self.newest
        if attempt is not None:
            attempt.setback, attempt.why = setback, why[:MOST_TEXT]
            attempt.ended_s, attempt.again = now_s, again


BOUNDS: Final = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Predictions:
    """How well the predictions of one router came true: real seconds divided by predicted ones."""

    def __init__(self) -> None:
        self.first_token: dict[Role, Times] = {role: Times(BOUNDS) for role in ROLES}
        """By the pool that computed the prompt."""
        self.hand_off = Times(BOUNDS)

    def saw_word(self, record: RequestRecord) -> None:
        """Record the first output of a request's newest placement."""
        attempt = record.newest
        if attempt is None or attempt.placements[-1:] != [record.placement]:
            return
        match len(attempt.placements):
            case 1:
                real_s, expected_s = attempt.first_token_s, attempt.first_token_expected_s
                ratios = self.first_token[record.pool]
            case 2:
                real_s, expected_s = attempt.hand_off_s, attempt.hand_off_expected_s
                ratios = self.hand_off
            case _:
                return
        if expected_s and real_s is not None:
            ratios.observe(real_s / expected_s)
