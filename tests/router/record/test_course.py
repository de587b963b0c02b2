"""What a router keeps of when things happened to a request: little, bounded, and in order."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_protocol import RequestJourneyEvent
from diptych_protocol import RequestJourneyEventType as Station
from diptych_router.requests.request_record import (
    MOST_MARKS,
    MOST_STATIONS,
    Placement,
    TokenTimes,
)


def told(kind: Station, time_s: float, tokens: int = 0) -> RequestJourneyEvent:
    return RequestJourneyEvent("r/1", kind, time_s, None, tokens)


def kept(placement: Placement) -> list[tuple[str, float, int]]:
    return [(kind.name, at_s, tokens) for kind, at_s, tokens, _ in placement.stations()]


def test_an_engines_times_are_placed_by_the_fastest_of_its_messages() -> None:
    placement = Placement("r/1", "p", "pod p", sent_s=10.0)
    placement.heard(told(Station.QUEUED, 100.0), 10.75)
    placement.heard(told(Station.SCHEDULED, 100.5, 16), 11.0)  # half a second under way at most
    assert kept(placement) == [("QUEUED", 10.5, 0), ("SCHEDULED", 11.0, 16)]


def test_nothing_happens_at_an_engine_before_it_was_sent_there() -> None:
    placement = Placement("r/1", "p", "pod p", sent_s=10.0)
    placement.heard(told(Station.QUEUED, 1.0), 10.2)
    placement.heard(told(Station.SCHEDULED, 5.0), 10.3)
    assert [at_s for _, at_s, _ in kept(placement)] == [10.0, 10.3]


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -math.inf])
def test_times_that_are_none_and_departures_are_not_kept(time_s: float) -> None:
    placement = Placement("r/1", "p", "pod p", sent_s=0.0)
    placement.heard(told(Station.QUEUED, time_s), 1.0)
    placement.heard(told(Station.DEPARTED, 1.0), 1.0)
    placement.heard(told(Station.OTHER, 1.0), 1.0)
    assert kept(placement) == []


def test_a_prompt_in_many_parts_keeps_its_first_parts_and_its_end() -> None:
    placement = Placement("r/1", "p", "pod p", sent_s=0.0)
    for number in range(3 * MOST_STATIONS):
        placement.heard(told(Station.CHUNK, float(number), 16 * number), float(number))
    placement.heard(told(Station.FIRST_TOKEN, 1000.0, 9999), 1000.0)
    names = [name for name, _, _ in kept(placement)]
    assert names == ["CHUNK"] * (MOST_STATIONS - 1) + ["FIRST_TOKEN"]
    assert kept(placement)[-1][1:] == (1000.0, 9999)


def test_every_token_of_a_short_answer_has_its_time() -> None:
    tokens = TokenTimes()
    for number in range(MOST_MARKS):
        tokens.came(1, number / 8)
    assert list(tokens.marks[::2]) == [number / 8 for number in range(MOST_MARKS)]
    assert list(tokens.marks[1::2]) == list(range(1, MOST_MARKS + 1))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=1000))
def test_times_of_tokens_are_bounded_grow_and_begin_with_the_first(counts: list[int]) -> None:
    tokens = TokenTimes()
    for moment, count in enumerate(counts):
        tokens.came(count, float(moment))
    times, totals = tokens.marks[::2], tokens.marks[1::2]
    assert len(times) <= MOST_MARKS
    assert (times[0], totals[0]) == (0.0, counts[0])
    assert all(a < b for a, b in pairwise(times))
    assert all(a < b for a, b in pairwise(totals))
    assert all(total == sum(counts[: int(t) + 1]) for t, total in zip(times, totals, strict=True))
    assert tokens.total == sum(counts)
