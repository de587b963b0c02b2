"""An engine that fails too often is left out until a canary went well, in virtual time."""

from __future__ import annotations

from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_router.engines.health_book import (
    FIRST_OPEN_S,
    FORGIVEN_S,
    LONGEST_OPEN_S,
    Breaker,
    State,
)


def after(outcomes: str, seconds: float = 0.1) -> tuple[Breaker, float]:
    """A breaker that saw these, one after the other; `.` is nothing. And the time."""
    breaker, now = Breaker(0.0), 0.0
    for outcome in outcomes:
        now += seconds
        if outcome == "+":
            breaker.well(now)
        elif outcome == "-":
            breaker.badly(now)
    return breaker, now


@each(
    ("outcomes", "seconds", "state"),
    [
        ("", 0.1, State.CLOSED),
        ("--", 0.1, State.CLOSED),
        ("---", 0.1, State.OPEN),
        ("---", 30.0, State.CLOSED),
        ("+-+-+-+-+-", 0.1, State.CLOSED),
        ("+++++---", 0.1, State.CLOSED),
        ("+++++---------", 0.1, State.OPEN),
        ("+" * 100 + "." * 600 + "---", 0.1, State.OPEN),
    ],
    ids=[
        "nothing", "two may be bad luck", "three", "seldom", "half of them", "a few of many",
        "most of them", "what was good a minute ago",
    ],
)  # fmt: skip
def test_most_of_the_last_outcomes_open_it(outcomes: str, seconds: float, state: State) -> None:
    assert after(outcomes, seconds)[0].state is state


def test_only_a_canary_closes_it() -> None:
    breaker, now = after("---")
    assert not breaker.canary_due(now)
    for _ in range(100):
        breaker.well(now)
    assert breaker.state is State.OPEN
    now += FIRST_OPEN_S
    assert breaker.canary_due(now)
    breaker.begin_canary()
    assert (breaker.state, breaker.canary_due(now + 999.0)) == (State.HALF_OPEN, False)
    breaker.canary_ended(now, ok=True)
    assert [breaker.badly(now), breaker.badly(now)] == [False, False], "the past is forgotten"


def test_canaries_that_fail_come_later_each_time_and_never_cease() -> None:
    breaker, now = after("---")
    waits = []
    for _ in range(40):
        begin = now
        while not breaker.canary_due(now):
            now += 0.5
        waits.append(round(now - begin, 3))
        breaker.begin_canary()
        breaker.canary_ended(now, ok=False)
    assert waits == sorted(waits)
    assert waits[0] <= FIRST_OPEN_S
    assert waits[-1] <= LONGEST_OPEN_S + 0.5


def test_who_fails_again_soon_is_left_out_for_longer_until_that_is_forgiven() -> None:
    breaker, now = after("---")
    for healthy_s, opened in [(10.0, 2), (10.0, 3), (FORGIVEN_S + 1.0, 1)]:
        breaker.begin_canary()
        breaker.canary_ended(now, ok=True)
        now += healthy_s
        assert [breaker.badly(now) for _ in range(3)] == [False, False, True]
        assert breaker.badness()[0] == opened


@given(st.lists(st.tuples(st.sampled_from("+-c"), st.floats(0.0, 100.0)), max_size=200))
def test_an_open_breaker_always_has_a_canary_ahead(history: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(0.0), 0.0
    for what, seconds in history:
        now += seconds
        was = breaker.state
        if what == "c" and breaker.canary_due(now):
            breaker.begin_canary()
            breaker.canary_ended(now, ok=seconds > 50.0)
            assert (breaker.state is State.CLOSED) == (seconds > 50.0)
            continue
        (breaker.badly if what == "-" else breaker.well)(now)
        assert breaker.state is was or (was is State.CLOSED and breaker.state is State.OPEN)
        if breaker.state is State.OPEN:
            assert breaker.canary_due(now + LONGEST_OPEN_S)
