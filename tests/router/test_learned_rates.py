"""Rates follow from reports, and hold on to what is known beforehand until there are some."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_router.engines.learned_rates import LEAST_PART, LearnedRates

PRIOR = np.array([5e-3, 1e-4, 1e-4])
rates = st.tuples(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-5, 1e-2))


@given(rates, st.integers(0, 1000))
def test_work_of_all_kinds_teaches_all_rates(true: tuple[float, ...], seed: int) -> None:
    random, learned = np.random.default_rng(seed), LearnedRates(PRIOR.tolist(), 1e-4)
    for _ in range(300):
        steps = float(random.integers(1, 50))
        amounts = (steps, float(random.integers(0, 4000)), steps * float(random.integers(0, 60)))
        learned.saw(amounts, float(np.dot(true, amounts)) * random.uniform(0.9, 1.1), PRIOR)
    for _ in range(20):
        amounts = (10.0, float(random.integers(100, 4000)), 10.0 * float(random.integers(1, 60)))
        assert np.dot(learned.rates, amounts) == pytest.approx(np.dot(true, amounts), rel=0.2)


def test_what_was_never_seen_stays_as_it_was_known() -> None:
    learned = LearnedRates(PRIOR.tolist(), 1e-4)
    for _ in range(500):
        learned.saw((10.0, 0.0, 80.0), 0.2, PRIOR)
    assert learned.rates[1] == pytest.approx(PRIOR[1])
    assert 10 * learned.rates[0] + 80 * learned.rates[2] == pytest.approx(0.2, rel=0.02)


def test_what_is_seldom_seen_is_not_forgotten_meanwhile() -> None:
    """As how long a prompt takes where others compute prompts."""
    learned = LearnedRates(PRIOR.tolist(), 1e-4)
    for amounts, seconds in [((1.0, 128.0, 0.0), 0.14)] * 3 + [((10.0, 0.0, 10.0), 0.15)] * 2000:
        learned.saw(amounts, seconds, PRIOR)
    assert learned.rates[1] == pytest.approx(1e-3, rel=0.15)


def test_an_engine_that_becomes_slower_is_known_to_be_so() -> None:
    learned = LearnedRates(PRIOR.tolist(), 1e-4)
    for seconds in [0.1] * 300 + [0.4] * 300:
        learned.saw((10.0, 1000.0, 0.0), seconds, PRIOR)
    assert 10 * learned.rates[0] + 1000 * learned.rates[1] == pytest.approx(0.4, rel=0.05)


@each(
    ("amounts", "seconds"),
    [
        ((0.0, 0.0, 0.0), 1.0),
        ((1.0, -5.0, 0.0), 1.0),
        ((1.0, 0.0, 0.0), 0.0),
        ((1.0, 0.0, 0.0), -1.0),
        ((1.0, 0.0, 0.0), float("nan")),
        ((float("nan"), 0.0, 0.0), 1.0),
        ((1.0, 0.0, 0.0), float("inf")),
        ((1e300, 1.0, 1.0), 1.0),
    ],
)
def test_what_cannot_be_true_teaches_nothing(amounts: tuple[float, ...], seconds: float) -> None:
    learned = LearnedRates(PRIOR.tolist(), 1e-4)
    learned.saw(amounts, seconds, PRIOR)
    assert learned.rates.tolist() == PRIOR.tolist()
    assert not learned.told


@given(
    st.lists(
        st.tuples(st.tuples(*[st.floats(0, 1e11)] * 3), st.floats(1e-9, 1e5)),
        min_size=1,
        max_size=30,
    )
)
def test_rates_are_finite_and_positive_whatever_is_reported(
    reports: list[tuple[tuple[float, ...], float]],
) -> None:
    learned = LearnedRates(PRIOR.tolist(), 1e-4)
    for amounts, seconds in reports:
        learned.saw(amounts, seconds, PRIOR)
        assert np.isfinite(learned.rates).all()
        assert (learned.rates >= LEAST_PART * PRIOR).all()
