"""Which engines with open breakers are left out, and how long a first token may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_router.engines.health_book import Breaker, State, left_out
from diptych_router.requests.attempts import LEAST_PATIENCE_S, patience_s


def breakers(failures: dict[str, int]) -> dict[str, Breaker]:
    """Engines that have failed so often, within a moment."""
    found = {}
    for key, count in failures.items():
        found[key] = Breaker(0.0)
        for _ in range(count):
            found[key].badly(1.0)
    return found


@pytest.mark.parametrize(
    ("failures", "out"),
    [
        ({"a": 9}, set()),
        ({"a": 9, "b": 0}, {"a"}),
        ({"a": 9, "b": 9}, {"a"}),
        ({"a": 9, "b": 9, "c": 0}, {"a"}),
        ({"a": 9, "b": 9, "c": 0, "d": 0}, {"a", "b"}),
        ({"a": 0, "b": 2}, set()),
    ],
    ids=["alone", "one of two", "both", "two of three", "two of four", "none is open"],
)
def test_at_most_half_of_a_pool_is_left_out(failures: dict[str, int], out: set[str]) -> None:
    assert set(left_out(breakers(failures))) == out


def test_the_worst_are_left_out() -> None:
    pool = breakers({"bad": 3, "worse": 3, "worst": 3})
    for key in ("worst", "worse", "worst"):
        pool[key].canary_ended(2.0, ok=False)
    assert left_out(pool) == ["worst"]
    del pool["worst"]
    assert left_out(pool) == ["worse"]


def test_an_engine_is_taken_in_again_when_its_canary_went_well() -> None:
    pool = breakers({"a": 3, "b": 0})
    assert left_out(pool) == ["a"]
    assert [key for key, breaker in pool.items() if breaker.canary_due(99.0)] == ["a"]
    pool["a"].canary_ended(99.0, ok=True)
    assert left_out(pool) == []
    assert pool["a"].num_opened == 1


@given(st.dictionaries(st.integers(0, 30).map(str), st.integers(0, 5), min_size=1))
def test_at_least_half_of_any_pool_and_all_that_are_well_can_be_used(
    failures: dict[str, int],
) -> None:
    pool = breakers(failures)
    out = left_out(pool)
    assert 2 * len(out) <= len(failures)
    assert all(pool[key].state is State.OPEN for key in out)


def test_the_deadline_of_a_first_token_follows_what_is_expected() -> None:
    assert patience_s({}, 0) == LEAST_PATIENCE_S
    assert patience_s({"compute_s": 2.0, "steps_s": 1e6}, 10**9) == LEAST_PATIENCE_S + 16.0
    queued = {"compute_s": 2.0, "wait_s": 10.0, "transfer_s": 1.0, "room_s": 3.0}
    assert patience_s(queued, 0) == LEAST_PATIENCE_S + 128.0
    assert patience_s({"open_tokens": 1000.0}, 500) == LEAST_PATIENCE_S + 30.0
    assert patience_s({}, 0, 1.0) == 1.0
