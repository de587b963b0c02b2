"""An engine that says nothing is found out in time, and one that only computes for long is not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_protocol.wire import Heartbeat
from diptych_router.engines.liveness import GRACE_S, HANGS_S, MOST_PROMISED_S, Liveness


def follow(beats: dict[float, Heartbeat], until: float, asleep: range = range(0)) -> Liveness:
    """Look whenever that is due, as a link does, while heartbeats come at these times; the router
    stands still during the seconds of `asleep`, and reads afterwards what came meanwhile."""
    watched, coming = Liveness(), sorted(beats)
    now, look_at = 0.0, 1.0
    while now < until:
        now = min([look_at, until, *coming[:1]])
        if asleep and asleep.start <= now < asleep.stop:
            now = float(asleep.stop)
        if look_at <= now:  # before what came meanwhile is read
            look_at = now + (watched.look(now) if watched.sends_heartbeats else 1.0)
        while coming and coming[0] <= now:
            watched.beat(beats[coming.pop(0)], now)
    return watched


def test_silence_is_found_within_two_seconds_of_the_missed_heartbeat() -> None:
    beats = {0.5 * at: Heartbeat(1.0) for at in range(1, 21)}
    assert not follow(beats, 10.9).overdue
    late = follow(beats, 10.0 + 1.0 + GRACE_S)
    assert late.overdue
    assert (late.hangs(10.9 + HANGS_S), late.hangs(11.0 + HANGS_S)) == (False, True)
    assert GRACE_S < 2.0


def test_a_long_step_that_was_told_is_no_silence() -> None:
    beats = {1.0: Heartbeat(1.0), 1.2: Heartbeat(30.0)}
    assert not follow(beats, 31.0).overdue
    assert follow(beats, 31.2 + GRACE_S).overdue


def test_an_engine_that_speaks_again_is_not_silent() -> None:
    beats = {1.0: Heartbeat(1.0), 20.0: Heartbeat(1.0)}
    assert follow(beats, 19.9).overdue
    again = follow(beats, 20.0)
    assert (again.overdue, again.hangs(20.0 + HANGS_S)) == (False, False)


def test_a_router_that_stood_still_reads_before_it_judges() -> None:
    beats = {0.5 * at: Heartbeat(1.0) for at in range(1, 81)}
    for stop in range(12, 30):
        assert not follow(beats, stop + 0.5 * GRACE_S, range(10, stop)).overdue


def test_an_engine_of_an_older_release_is_not_judged() -> None:
    watched = Liveness()
    assert not watched.sends_heartbeats
    assert watched.look(1e6) == math.inf
    assert not watched.overdue


@pytest.mark.parametrize("promised", [math.nan, math.inf, -1.0, 1e30])
def test_no_promise_is_for_ever(promised: float) -> None:
    watched = Liveness()
    watched.beat(Heartbeat(promised), 0.0)
    now, wait_s = 0.0, watched.look(0.0)
    while not watched.overdue:
        now += wait_s
        wait_s = watched.look(now)
    assert now <= MOST_PROMISED_S + GRACE_S


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=30), st.floats(0.5, 20.0))
def test_who_keeps_every_promise_is_never_silent_and_who_stops_is(
    gaps: list[float], promise: float
) -> None:
    now, beats = 1.0, {}
    for gap in gaps:
        beats[now] = Heartbeat(promise)
        now += min(gap, promise)
    last = max(beats)
    assert not follow(beats, last + promise).overdue
    assert follow(beats, last + promise + 2.0).overdue
