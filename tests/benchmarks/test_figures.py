"""Medians, spreads and ratios of what was measured."""

from __future__ import annotations

import pytest
from benchmarks.figures import Record, Spread, ratio, spread
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.figures import percentile

values = st.lists(st.floats(0, 1e6), min_size=1)


def records(system: str, *figures: float, case: str = "128/1") -> list[Record]:
    return [Record(case, system, n, {"ms": figure}) for n, figure in enumerate(figures)]


@given(values)
def test_a_percentile_lies_between_the_extremes_and_grows(numbers: list[float]) -> None:
    tenths = [percentile(numbers, percent) for percent in range(0, 101, 10)]
    assert tenths == sorted(tenths)
    assert (tenths[0], tenths[-1]) == (min(numbers), max(numbers))


def test_a_percentile_is_taken_between_neighbours() -> None:
    assert percentile([10, 30, 20], 75) == 25


@pytest.mark.parametrize("of", [lambda: percentile([], 50), lambda: Spread.of([])])
def test_nothing_has_no_figure(of: object) -> None:
    with pytest.raises(ValueError, match="no values"):
        of()  # type: ignore[operator]


def test_a_spread_is_of_one_case_of_one_system() -> None:
    measured = [
        *records("ours", 3, 1, 2),
        *records("theirs", 9),
        *records("ours", 50, case="512/1"),
    ]
    assert spread(measured, "128/1", "ours", "ms") == Spread(2, 1, 3)
    assert spread(measured, "128/1", "ours", "tokens") is None
    assert spread(measured, "128/4", "ours", "ms") is None


def test_a_ratio_is_taken_within_each_repetition() -> None:
    """The second repetition ran on a machine that was ten times slower, for both."""
    measured = [*records("ours", 1, 10, 1), *records("theirs", 2, 40, 5)]
    assert ratio(measured, "128/1", "ms", "theirs", "ours") == Spread(4, 2, 5)


def test_a_ratio_needs_both_in_the_same_repetition() -> None:
    measured = [*records("ours", 1, 10, 1), *records("theirs", 2, 0)]
    assert ratio(measured, "128/1", "ms", "ours", "theirs") == Spread(0.5, 0.5, 0.5)
    assert ratio(measured, "128/1", "ms", "ours", "nobody") is None


@pytest.mark.parametrize(
    ("of", "text"),
    [(Spread(2, 1, 3), "2.0 (1.0-3.0)"), (Spread(2, 2, 2), "2.0")],
    ids=["several", "one value"],
)
def test_a_spread_is_written_with_what_lies_around_it(of: Spread, text: str) -> None:
    assert of.text(1) == text
