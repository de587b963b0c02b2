"""Which engines serve a request."""

from __future__ import annotations

import pytest

from diptych_router.policy import EngineView, decide


def views(*specs: tuple[str, str, int]) -> list[EngineView]:
    return [EngineView(*spec) for spec in specs]


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ([("p", "x", 0)], [("d", "x", 0)], ("p", "d")),
        ([("p1", "x", 9), ("p2", "x", 1)], [("d1", "x", 5), ("d2", "x", 2)], ("p2", "d2")),
        ([("p1", "x", 9), ("p2", "y", 1)], [("d1", "x", 5)], ("p1", "d1")),
        ([("p", "x", 0)], [("old", "w", 0), ("d", "x", 50)], ("p", "d")),
        ([], [("d1", "x", 3), ("d2", "x", 1)], (None, "d2")),
        ([("p", "x", 0)], [("d", "y", 0)], (None, "d")),
    ],
    ids=["one pair", "least loaded", "fitting prefill", "fitting decode", "no prefill", "misfit"],
)
def test_the_least_loaded_pair_that_fits_together(prefill, decode, expected) -> None:
    decision = decide(views(*prefill), views(*decode))
    assert decision is not None
    assert (decision.prefill, decision.decode) == expected


def test_without_a_decode_engine_there_is_no_decision() -> None:
    assert decide(views(("p", "x", 0)), []) is None


def test_a_decision_says_why_there_is_no_pair() -> None:
    empty = decide([], views(("d", "x", 0)))
    misfit = decide(views(("p", "y", 0)), views(("d", "x", 0)))
    assert empty is not None
    assert "pool is empty" in empty.reason
    assert misfit is not None
    assert "compatible" in misfit.reason
