"""Which engines with open breakers are left out, and how long a first token may take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_router.engines.health_book import Failure, HealthBook, State
from diptych_router.requests.attempts import LEAST_PATIENCE_S, patience_s


def book_of(failures: dict[str, int]) -> HealthBook:
    """Engines that have failed so often, within a moment."""
    book = HealthBook()
    for key, count in failures.items():
        book.add(key, 0.0)
        for _ in range(count):
            book.went_badly(key, Failure.ERROR, 1.0)
    return book


def kept_out(book: HealthBook, *pools: Sequence[str]) -> set[str]:
    return {key for pool in pools for key in book.left_out(pool)}


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
    assert kept_out(book_of(failures), list(failures)) == out


def test_the_worst_are_left_out() -> None:
    book = book_of({"bad": 3, "worse": 3, "worst": 3})
    for key in ("worst", "worse", "worst"):
        book.engines[key].canary_ended(2.0, ok=False)
    assert kept_out(book, ["bad", "worse", "worst"]) == {"worst"}
    assert kept_out(book, ["bad", "worse"]) == {"worse"}


def test_pools_are_judged_apart_and_who_is_not_usable_does_not_count() -> None:
    book = book_of({"p1": 3, "p2": 0, "d1": 3, "d2": 0})
    assert kept_out(book, ["p1", "p2"], ["d1"]) == {"p1"}


def test_an_engine_is_taken_in_again_when_its_canary_went_well() -> None:
    book = book_of({"a": 3, "b": 0})
    assert kept_out(book, ["a", "b"]) == {"a"}
    assert book.canaries_due({"b"}, 99.0) == []
    assert book.canaries_due({"a", "b"}, 99.0) == ["a"]
    book.engines["a"].canary_ended(99.0, ok=True)
    assert kept_out(book, ["a", "b"]) == set()
    assert (book.engines["a"].num_opened, book.engines["a"].failures) == (1, {Failure.ERROR: 3})


def test_an_address_that_is_gone_is_ignored() -> None:
    book = book_of({"a": 3})
    book.forget("a")
    book.went_well(["a"], 1.0)
    assert not book.went_badly("a", Failure.LOST, 1.0)
    assert kept_out(book, ["a", "b"]) == set()


@given(st.dictionaries(st.integers(0, 30).map(str), st.integers(0, 5), min_size=1))
def test_at_least_half_of_any_pool_and_all_that_are_well_can_be_used(
    failures: dict[str, int],
) -> None:
    book = book_of(failures)
    out = kept_out(book, list(failures))
    assert 2 * len(out) <= len(failures)
    assert all(book.engines[key].state is State.OPEN for key in out)


def test_the_deadline_of_a_first_token_follows_what_is_expected() -> None:
    assert patience_s({}, 0) == LEAST_PATIENCE_S
    assert patience_s({"compute_s": 2.0, "steps_s": 1e6}, 10**9) == LEAST_PATIENCE_S + 16.0
    queued = {"compute_s": 2.0, "wait_s": 10.0, "transfer_s": 1.0, "room_s": 3.0}
    assert patience_s(queued, 0) == LEAST_PATIENCE_S + 128.0
    assert patience_s({"open_tokens": 1000.0}, 500) == LEAST_PATIENCE_S + 30.0
    assert patience_s({}, 0, 1.0) == 1.0
