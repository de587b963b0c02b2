"""The times of a request's events: at engines, by their reports, and of its tokens.

Times are seconds of the router's clock. The records are bounded and small, because there are
thousands of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Final

from diptych_protocol import EngineCoreOutput, RequestJourneyEvent
from diptych_protocol import RequestJourneyEventType as Station

MOST_STATIONS: Final = 40
"""The most events of a request at one engine that are kept. If a prompt has more parts, the newest
part replaces the one before it; then parts look longer than they were."""
MOST_MARKS: Final = 64
"""The most times of tokens that are kept for a request."""
PARTS: Final = 4
"""How many numbers an event has."""


class Placement:
    """A request at one engine."""

    __slots__ = (
        "_lag_s", "_told", "cached_tokens", "core_id", "engine", "first_tokens", "first_word_s",
        "name", "num_tokens", "received_tokens", "sent_s",
    )  # fmt: skip

    def __init__(self, core_id: str, engine: str, name: str, sent_s: float) -> None:
        """core_id: the engine's id of the request. engine: a key. name: the engine's name for
        people."""
        self.core_id, self.engine, self.name, self.sent_s = core_id, engine, name, sent_s
        self.first_word_s: float | None = None
        self.cached_tokens = self.received_tokens = 0
        self.first_tokens = 0
        """How many tokens its first word brought."""
        self.num_tokens = 0
        self._told: array[float] | None = None
        """Each station's type, the engine's time, how far the prompt was, and how often the request
        was preempted, one after the other; None: it tells nothing."""
        self._lag_s = math.inf
        """The router's clock less the engine's: the least that was seen, so it contains the
        shortest time that a message took."""

    def brought(self, output: EngineCoreOutput, now_s: float) -> None:
        """Record the engine's first output."""
        self.first_word_s = now_s
        self.first_tokens = len(output.new_token_ids)
        self.cached_tokens = output.num_cached_tokens
        self.received_tokens = output.num_received_tokens

    def heard(self, station: RequestJourneyEvent, now_s: float) -> None:
        """Record an event that the engine reports. An impossible one is dropped."""
        time_s, kind = station.ts_monotonic, station.event_type
        if not math.isfinite(time_s) or kind is Station.DEPARTED:
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

    __slots__ = ("_next", "_num_marks", "_stride", "marks", "total")

    def __init__(self) -> None:
        self.marks = array("d")
        """A time, how many tokens there were then, the next time, ..."""
        self.total = 0
        self._num_marks = 0
        self._stride = self._next = 1

    def came(self, num_tokens: int, now_s: float) -> None:
        """Record this many more tokens."""
        self.total += num_tokens
        if self.total < self._next:
            return
        if self._num_marks == MOST_MARKS:
            self._thin_out()
        self.marks.extend((now_s, self.total))
        self._num_marks += 1
        self._next = self.total + self._stride

    def _thin_out(self) -> None:
        """Forget every second mark."""
        times, counts = self.marks[::4], self.marks[1::4]
        self.marks = array("d")
        for mark in zip(times, counts, strict=True):
            self.marks.extend(mark)
        self._num_marks //= 2
        self._stride *= 2
