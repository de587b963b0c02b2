"""What happened to a request, from its arrival to its end.

    attempt 1: placement at prefill ─▶ placement at decode ─┐ (a failure, or an engine that drains)
    attempt 2: placement at prefill ─▶ ...      ◀───────────┘

The request table writes a record when it decides something, and adds the events that engines
report. Spans, explanations, timelines, predictions and promises are read from it. Nothing else
tracks a request. There is no I/O here: times are seconds of the router's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from diptych_protocol import EngineCoreOutput, EngineCoreRequest
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policy import FETCH, Decision
from diptych_router.engines.engine_table import Role
from diptych_router.requests.record.course import Placement, TokenTimes

MOST_TEXT: Final = 1024
"""A reason and an error are cut to this length."""


class Setback(enum.Enum):
    """Why a request needs a new attempt."""

    ERROR = enum.auto()
    """An engine reports that it failed with it."""
    LOSS = enum.auto()
    """The engine vanished, gave the request up, or could not take it over."""
    FULL = enum.auto()
    """The engine has no room for it now. Another may have; if none has, the client has to come back
    later."""
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
        if not self.decision.prefill or not self.decoding:
            return None
        first, second = (placement.first_word_s for placement in self.placements[:2])
        return None if first is None or second is None else second - first

    @property
    def first_token_expected_s(self) -> float | None:
        """The expected seconds; None if the policy gives none."""
        terms = self.decision.terms
        if "wait_s" not in terms:
            return None
        return terms["wait_s"] + terms["compute_s"] + terms.get(FETCH, 0.0)

    @property
    def hand_off_expected_s(self) -> float | None:
        """The expected seconds, including the next step of decode; None without a hand-off, or if
        the policy gives none."""
        terms = self.decision.terms
        if "transfer_s" not in terms or self.output_tokens <= 0:
            return None
        return terms["transfer_s"] + terms["steps_s"] / self.output_tokens


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Of its prompt only the number of tokens is kept."""

    request_id: str
    """The router's own."""
    shown_id: str
    """The client's."""
    tenant: str
    prompt_tokens: int
    prefill_only: bool
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

    def brought(self, output: EngineCoreOutput, now_s: float) -> bool:
        """Record an output of the engine in charge; True if this is its first output, or has the
        request's first token."""
        placement, num_tokens = self.placement, len(output.new_token_ids)
        is_first = False
        if placement is not None:
            if placement.first_word_s is None:
                placement.brought(output, now_s)
                is_first = True
            placement.num_tokens += num_tokens
        if num_tokens:
            if self.first_token_s is None:
                self.first_token_s = now_s
                is_first = True
            self.tokens.came(num_tokens, now_s)
        return is_first

    def set_back(self, setback: Setback, why: str, again: bool, now_s: float) -> None:
        """Record that the newest attempt ended early. again: the request needs engines again."""
        attempt = self.newest
        if attempt is not None:
            attempt.setback, attempt.why = setback, why[:MOST_TEXT]
            attempt.ended_s, attempt.again = now_s, again
