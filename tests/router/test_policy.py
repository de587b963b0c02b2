"""Which engines serve a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_pools import EngineView, choose, successor

from diptych_router.choosing.policy import Decision, RequestView

POOL = st.lists(
    st.builds(
        EngineView,
        key=st.uuids().map(str),
        fingerprint=st.sampled_from("abc"),
        load=st.integers(0, 5),
        usable=st.booleans(),
    ),
    max_size=6,
)


def decide(prefill: Sequence[EngineView], decode: Sequence[EngineView]) -> Decision | None:
    return choose(RequestView(), prefill, decode)


def decide_prefill(prefill: Sequence[EngineView], decode: Sequence[EngineView]) -> Decision | None:
    return choose(RequestView(prefill_only=True), prefill, decode)


Spec = tuple[str, str, int]
"""Key, fingerprint and load."""


def views(*specs: Spec) -> list[EngineView]:
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
    ids=[
        "one pair",
        "least loaded",
        "fitting prefill",
        "fitting decode",
        "no prefill",
        "no fit",
    ],
)
def test_the_least_loaded_pair_that_fits_together(
    prefill: list[Spec], decode: list[Spec], expected: tuple[str | None, str]
) -> None:
    decision = decide(views(*prefill), views(*decode))
    assert decision is not None
    assert (decision.prefill, decision.decode) == expected


def test_without_a_decode_engine_there_is_no_decision() -> None:
    assert decide(views(("p", "x", 0)), []) is None


def test_a_decision_says_why_there_is_no_pair() -> None:
    empty = decide([], views(("d", "x", 0)))
    unfit = decide(views(("p", "y", 0)), views(("d", "x", 0)))
    assert empty is not None
    assert "no usable prefill engine" in empty.reason
    assert unfit is not None
    assert "fits" in unfit.reason


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ([("p1", "x", 9), ("p2", "y", 1)], [("d", "z", 0)], ("p2", "p2")),
        ([("p", "x", 9)], [], ("p", "p")),
        ([], [("d1", "x", 3), ("d2", "y", 1)], (None, "d2")),
    ],
    ids=["freest prefill, whatever fits", "no decode needed", "no prefill"],
)
def test_what_ends_with_its_prefill_goes_to_one_engine(
    prefill: list[Spec], decode: list[Spec], expected: tuple[str | None, str]
) -> None:
    decision = decide_prefill(views(*prefill), views(*decode))
    assert decision is not None
    assert (decision.prefill, decision.decode) == expected


def test_without_engines_nothing_is_prefilled() -> None:
    assert decide_prefill([EngineView("p", "x", 0, usable=False)], []) is None


@given(POOL, POOL)
def test_any_pools(prefill: list[EngineView], decode: list[EngineView]) -> None:
    decision = decide(prefill, decode)
    usable = {e.key: e for e in [*prefill, *decode] if e.usable}
    pairs = [
        p.load + d.load
        for p, d in product(prefill, decode)
        if p.usable and d.usable and p.fingerprint == d.fingerprint
    ]
    alone = [d.load for d in decode if d.usable]
    if decision is None:
        assert not alone
    elif decision.prefill is None:
        assert not pairs, "an engine without a partner serves only when there is no pair"
        assert usable[decision.decode].load == min(alone)
    else:
        chosen = usable[decision.prefill], usable[decision.decode]
        assert chosen[0].fingerprint == chosen[1].fingerprint
        assert chosen[0].load + chosen[1].load == min(pairs)


@given(POOL, st.sampled_from("abc"))
def test_any_successor(decode: list[EngineView], fingerprint: str) -> None:
    fitting = [d for d in decode if d.usable and d.fingerprint == fingerprint]
    chosen = successor(decode, fingerprint)
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        [load] = [d.load for d in fitting if d.key == chosen]
        assert load == min(d.load for d in fitting)


@settings(max_examples=12)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_revisions_share_requests_in_proportion_to_their_engines(sizes: list[int]) -> None:
    """Every request is of one size and none ends: loads tell who got how many."""
    loads = {(f, i): 0 for f, size in enumerate(sizes) for i in range(size)}
    for _ in range(60):
        engines = [EngineView(f"{f} {i}", str(f), load) for (f, i), load in loads.items()]
        decision = decide(engines, engines)
        assert decision is not None
        f, i = decision.decode.split()
        loads[int(f), int(i)] += 1
    assert max(loads.values()) - min(loads.values()) <= 1
