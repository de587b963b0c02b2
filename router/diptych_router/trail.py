"""What a router notes of a request's way through the pools, for the spans that it sends at its end.

    attempt 1: queue ─▶ prefill ─▶ hand-off ─▶ decode ─┐ (a failure, or an engine that leaves)
    attempt 2: queue ─▶ prefill ─▶ ...        ◀────────┘

Pure: times come in, in seconds of one monotonic clock, and so do the ids of spans, because an
engine is told the id of its parent span before that span has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from diptych_protocol import EngineCoreRequest, RequestJourneyEvent

PhaseName = Literal["queue", "prefill", "hand-off", "decode"]

MAX_STATIONS = 64
"""An engine may say so much of a request at one place; more is not kept."""


@dataclass(slots=True)
class Placement:
    """A request at one engine, and the stations that the engine has told."""

    core_id: str
    engine: str
    stations: list[RequestJourneyEvent] = field(default_factory=list)
    lag_s: float = math.inf
    """The router's clock less the engine's: the least that was seen, so it contains the shortest
    time that a message took."""

    def heard(self, station: RequestJourneyEvent, now_s: float) -> None:
        """The engine tells a station; times that are no numbers are not believed."""
        if len(self.stations) < MAX_STATIONS and math.isfinite(station.ts_monotonic):
            self.stations.append(station)
            self.lag_s = min(self.lag_s, now_s - station.ts_monotonic)

    def time_of(self, station: RequestJourneyEvent) -> float:
        """When that was, by the router's clock."""
        return station.ts_monotonic + self.lag_s


@dataclass(slots=True)
class Phase:
    """A part of an attempt."""

    name: PhaseName
    span_id: int
    began_s: float
    placement: Placement | None = None
    """None of a queue."""
    ended_s: float | None = None
    num_tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Attempt:
    """From the wish for engines to an end or a failure. The first one has no span of its own: its
    `span_id` is the request's."""

    span_id: int
    began_s: float
    phases: list[Phase]
    because: str = ""
    """Why there had to be another attempt."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Which engines were chosen, and why."""
    ended_s: float | None = None
    error: str = ""
    """The kind of failure that ended it."""


class Trail:
    """Follows one request. Its methods may be called in any order, since engines may say anything;
    what makes no sense is ignored."""

    def __init__(
        self, request: EngineCoreRequest, began_s: float, new_id: Callable[[], int]
    ) -> None:
        """`new_id()`: the id of another span."""
        self.request = request
        self.span_id = new_id()
        self.attempts = [Attempt(self.span_id, began_s, [Phase("queue", new_id(), began_s)])]
        self.placements: list[Placement] = []
        self.num_tokens = 0
        self.first_token_s: float | None = None
        self.ended_s = began_s
        self.finish_reason = ""
        self.error = self.error_type = ""
        self._new_id = new_id

    @property
    def began_s(self) -> float:
        return self.attempts[0].began_s

    @property
    def _phase(self) -> Phase:
        return self.attempts[-1].phases[-1]

    def chosen(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Engines were chosen for the attempt."""
        self.attempts[-1].facts = facts
        self._close(now_s)

    def sent(self, core_id: str, engine: str, now_s: float) -> int:
        """It goes to an engine. Returns the id of the span that the engine's spans belong to."""
        placement = Placement(core_id, engine)
        taken_over = self._phase.placement is not None
        self._close(now_s)
        self.placements.append(placement)
        return self._open("hand-off" if taken_over else "prefill", now_s, placement)

    def delivered(self, num_tokens: int, now_s: float) -> None:
        """Tokens came. The first ones of a placement end the phase that led to them."""
        phase = self._phase
        phase.num_tokens += num_tokens
        self.num_tokens += num_tokens
        if self.first_token_s is None:
            self.first_token_s = now_s
        if phase.placement is None or phase.ended_s is not None or phase.name == "decode":
            return
        self._close(now_s)
        if phase.name == "hand-off" or self._decodes_where_it_prefills:
            self._open("decode", now_s, phase.placement)

    @property
    def _decodes_where_it_prefills(self) -> bool:
        facts = self.attempts[-1].facts
        return facts.get("prefill") == facts.get("decode")

    def interrupted(self, kind: str, why: str, again: bool, now_s: float) -> None:
        """The attempt is over before its time. kind: of the failure; empty if it is none, because
        an engine leaves in good order. again: another attempt begins now."""
        self._close(now_s, why if kind else "")
        attempt = self.attempts[-1]
        attempt.ended_s, attempt.error = now_s, kind
        if again:
            queue = Phase("queue", self._new_id(), now_s)
            self.attempts.append(Attempt(self._new_id(), now_s, [queue], because=why))

    def end(self, now_s: float, reason: str, error: str = "", error_type: str = "") -> None:
        """It is over. reason: how it finished; empty if it failed."""
        self._close(now_s, error)
        if self.attempts[-1].ended_s is None:
            self.attempts[-1].ended_s = now_s
            self.attempts[-1].error = error_type
        self.ended_s, self.finish_reason = now_s, reason
        self.error, self.error_type = error, error_type

    def _open(self, name: PhaseName, now_s: float, placement: Placement) -> int:
        phase = Phase(name, self._new_id(), now_s, placement)
        attempt = self.attempts[-1]
        attempt.phases.append(phase)
        attempt.ended_s = None  # it goes on, whatever was said of its end
        return phase.span_id

    def _close(self, now_s: float, error: str = "") -> None:
        phase = self._phase
        if phase.ended_s is None:
            phase.ended_s, phase.error = now_s, error
