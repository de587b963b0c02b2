"""Pools that follow their promise: what is counted, what is learned, and loads of a day."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from cases import each
from cluster_kit.promised_pool import PromisedPool, engine_report, router_report
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_operator.api.pools import (
    Counts,
    DecodeAutoscaling,
    DecodePool,
    PrefillAutoscaling,
    PrefillPool,
)
from diptych_operator.attainment import (
    TRIED_PART,
    Attainment,
    Learned,
    Overload,
    attainment,
    need,
)
from diptych_operator.autoscale import Memory, Scaling, autoscale
from diptych_protocol.admin import PromiseCount

TARGET = 0.95
START, NOW = 0.0, 1000.0
FOUR = Learned(ready=4, since=START)
OVERLOADED = Learned(ready=4, since=START, overload=Overload(3, 10 / 3))
SETTLED = Memory(busy_at=START, prefill_learned=FOUR, decode_learned=FOUR)


def counts(pool: str, promise: str, **outcomes: int) -> list[PromiseCount]:
    return [
        PromiseCount(pool=pool, promise=promise, outcome=outcome, requests=number)
        for outcome, number in outcomes.items()
    ]


def seen(kept: int, missed: int = 0, refused: int = 0) -> Attainment:
    found = attainment(
        [router_report([], counts("p", "x", kept=kept, missed=missed, refused=refused))], "p"
    )
    assert found is not None
    return found


def first(**outcomes: int) -> list[PromiseCount]:
    return counts("prefill", "first_token", **outcomes)


@each(
    ("reports", "pool", "expected"),
    [
        ([], "prefill", None),
        ([[]], "prefill", None),
        ([first(kept=9, missed=1)], "decode", None),
        ([first(kept=9, missed=1)], "prefill", Attainment(0.9, 1, 0, 10)),
        ([first(kept=6, missed=1, refused=3)], "prefill", Attainment(0.6, 4, 3, 10)),
        # A router with few requests has no more say than these few.
        ([first(kept=90), first(kept=8, missed=2)], "prefill", Attainment(0.98, 2, 0, 100)),
        # Decode that computes prompts, too, has two promises: what counts is the worse one.
        (
            [[*counts("decode", "inter_token", kept=10),
              *counts("decode", "first_token", kept=1, refused=1)]],
            "decode",
            Attainment(0.5, 1, 1, 2),
        ),
        ([first(kept=0, missed=0)], "prefill", None),
        ([first(kept=5, missed=-5)], "prefill", Attainment(1.0, 0, 0, 5)),
    ],
)  # fmt: skip
def test_the_counts_of_all_routers_add_up(
    reports: list[list[PromiseCount]], pool: str, expected: Attainment | None
) -> None:
    assert attainment([router_report([], recent) for recent in reports], pool) == expected


@each(
    ("what", "attained", "learned", "crowded", "pods"),
    [
        ("nobody asks", None, FOUR, False, 0),
        ("all is well, so fewer may be tried", seen(100), FOUR, True, 3),
        ("a few too many are missed", seen(93, missed=7), FOUR, True, 5),
        ("half of them are refused", seen(50, refused=50), FOUR, False, 8),
        ("nearly all are missed", seen(1, missed=99), FOUR, True, 8),
        ("two may be chance", seen(1, missed=2), FOUR, True, 3),
        ("each has a pod of its own", seen(1, missed=99), FOUR, False, 4),
        ("pods were added just now", seen(50, missed=50), Learned(4, NOW - 1), True, 4),
        ("nor is anything given up then", seen(100), Learned(4, NOW - 1), True, 4),
        ("pods were taken away just now", seen(90, missed=9), Learned(4, NOW - 1, True), True, 5),
        ("pods have yet to come", seen(50, missed=50), Learned(2, START), True, 4),
        ("three would be too few", seen(600), OVERLOADED, True, 4),
        ("there is less to do", seen(500), OVERLOADED, True, 3),
        ("a fifth at a time", seen(600), Learned(40, START), True, 32),
    ],
)  # fmt: skip
def test_what_a_pool_needs(
    what: str, attained: Attainment | None, learned: Learned, crowded: bool, pods: int
) -> None:
    current = max(4, learned.ready)
    found = need(
        TARGET, attained, learned, NOW, current=current, ready=learned.ready, crowded=crowded
    )
    assert found.pods == pods, what


def learned_from(
    attained: Attainment, known: Overload | None, pods: int = 4, *, crowded: bool = True
) -> Overload | None:
    learned = Learned(pods, START, overload=known)
    found = need(TARGET, attained, learned, NOW, current=pods, ready=pods, crowded=crowded)
    return found.learned.overload


def test_an_overload_is_learned_from_what_pods_served_and_not_from_what_was_refused() -> None:
    assert learned_from(seen(240, refused=2000), None) == Overload(4, 1.0)
    assert learned_from(seen(0, missed=120), Overload(2, 9.0)) == Overload(4, 0.5)
    assert learned_from(seen(0, missed=120), None, crowded=False) is None


def test_an_overload_is_disproved_by_as_few_pods_that_do_clearly_more() -> None:
    known = Overload(4, 1.0)
    assert learned_from(seen(4 * 60), known) == known
    assert learned_from(seen(4 * 63), known) == known, "within what rates vary by"
    assert learned_from(seen(4 * 90), known) is None
    assert learned_from(seen(5 * 90), known, pods=5) == known, "five may do more each than four"
    small = Overload(4, 0.01)
    assert learned_from(seen(30, missed=2), small) == small, "perhaps they are missed"


outcomes = st.builds(seen, st.integers(1, 2000), st.integers(0, 500), st.integers(0, 500))
overloads = st.none() | st.builds(Overload, st.integers(1, 20), st.floats(0, 50))
histories = st.builds(
    Learned, st.integers(0, 20), st.floats(0, NOW), st.booleans(), overload=overloads
)


@given(
    attained=outcomes | st.none(),
    learned=histories,
    current=st.integers(1, 20),
    ready=st.integers(0, 20),
    crowded=st.booleans(),
    target=st.floats(0.5, 0.999),
)
def test_steps_are_bounded_and_a_missed_promise_never_lets_a_pool_shrink(
    attained: Attainment | None,
    learned: Learned,
    current: int,
    ready: int,
    crowded: bool,
    target: float,
) -> None:
    found = need(target, attained, learned, NOW, current=current, ready=ready, crowded=crowded)
    if attained is None:
        assert found.pods == 0
        return
    assert current - max(1, int(TRIED_PART * current)) <= found.pods <= 2 * current
    if attained.share < target and attained.not_kept >= 3:
        assert found.pods >= current
    if attained.share >= target or not (crowded or attained.refused):
        assert found.pods <= current
    again = need(
        target, attained, found.learned, NOW, current=current, ready=ready, crowded=crowded
    )
    assert again == found, "the same facts teach nothing new"


# With the other signals.


def scale(
    recent: Sequence[PromiseCount],
    *,
    waiting: int = 9,
    memory: Memory = SETTLED,
    unreachable: int = 0,
) -> Scaling:
    """Four pods in both pools, which follow their promises."""
    engines = [engine_report(role, n) for role in ("prefill", "decode") for n in range(3)]
    engines += [engine_report(role, 3, num_waiting=waiting) for role in ("prefill", "decode")]
    return autoscale(
        PrefillPool(autoscaling=PrefillAutoscaling(max_replicas=20, attainment=TARGET)),
        DecodePool(
            autoscaling=DecodeAutoscaling(
                max_replicas=20, attainment=TARGET, waiting_per_replica=100
            )
        ),
        Counts(4, 4),
        Counts(4, 4),
        [router_report(engines, recent, open_requests=1)],
        memory,
        NOW,
        block_size=16,
        unreachable_routers=unreachable,
    )


def test_each_pool_follows_its_own_promise() -> None:
    late = scale([*first(kept=80, missed=20), *counts("decode", "inter_token", kept=100)])
    assert late.desired == Counts(5, 4)
    slow = scale([*first(kept=100), *counts("decode", "inter_token", kept=80, missed=20)])
    assert slow.desired == Counts(4, 5)
    assert "80.0% of 100 requests keep the promise: 5 pods" in slow.reason


def test_more_pods_come_though_a_router_does_not_answer_but_nothing_is_learned() -> None:
    scaled = scale(first(kept=80, missed=20), unreachable=1)
    assert scaled.desired == Counts(5, 4)
    assert scaled.memory.prefill_learned == FOUR
    assert scale(first(kept=80, missed=20)).memory.prefill_learned.overload is not None


def test_a_pool_without_attainment_ignores_promises() -> None:
    engines = [engine_report("prefill", 0, num_waiting=9), engine_report("decode", 0)]
    scaled = autoscale(
        PrefillPool(autoscaling=PrefillAutoscaling(max_replicas=20)),
        DecodePool(),
        Counts(1, 1),
        Counts(1, 1),
        [router_report(engines, first(missed=100), open_requests=1)],
        Memory(prefill_learned=Learned(1, START)),
        NOW,
        block_size=16,
    )
    assert scaled.desired == Counts(1, 1)


# Whole days of virtual time.

HOUR_S = 3600.0
DAY_S = 6 * HOUR_S


def constant(now: float) -> float:
    return 20.0


def step(now: float) -> float:
    return 24.0 if HOUR_S < now < 3 * HOUR_S else 4.0


def day(now: float) -> float:
    return 11.0 - 9.0 * math.cos(2 * math.pi * now / DAY_S)


def simulated(
    rate: Callable[[float], float],
    seconds: float,
    *,
    refuses: bool,
    attained: float | None = TARGET,
    pods: int = 8,
    seed: int = 1,
) -> PromisedPool:
    pool = PromisedPool(
        PrefillAutoscaling(max_replicas=40, attainment=attained), pods, seed, refuses=refuses
    )
    pool.run(rate, seconds)
    return pool


@pytest.mark.parametrize(
    ("rate", "refuses"),
    [
        (day, True),
        (step, False),
        *(
            pytest.param(rate, refuses, marks=pytest.mark.slow)
            for rate, refuses in [(constant, True), (constant, False), (step, True), (day, False)]
        ),
    ],
)
def test_a_pool_keeps_its_promise_through_a_day_without_flapping(
    rate: Callable[[float], float], refuses: bool
) -> None:
    pool = simulated(rate, DAY_S, refuses=refuses)
    assert pool.share_kept() >= TARGET
    assert pool.turns() <= 8
    assert pool.turns(since=DAY_S / 2) <= 5


def test_it_does_so_with_as_few_pods_as_the_load_needs() -> None:
    """Five pods can just compute 20 prompts/s; a promise needs some room."""
    assert 5 < simulated(constant, DAY_S, refuses=True).sizes[-1][1] <= 7


def test_what_waits_alone_does_not_tell_of_what_is_refused() -> None:
    """Why there is `attainment`: a queue of refused requests is short."""
    assert simulated(constant, HOUR_S, refuses=True, attained=None, pods=3).share_kept() < 0.6
    assert simulated(constant, HOUR_S, refuses=True, pods=3).share_kept() > 0.9


@pytest.mark.parametrize("loads", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_load_that_stays_is_served_without_flapping(loads: int) -> None:
    @settings(max_examples=loads)
    @given(
        per_second=st.floats(0.5, 30.0),
        pods=st.integers(1, 12),
        refuses=st.booleans(),
        seed=st.integers(0, 100),
    )
    def holds(per_second: float, pods: int, refuses: bool, seed: int) -> None:
        hours = 2 * HOUR_S
        pool = simulated(lambda _: per_second, hours, refuses=refuses, pods=pods, seed=seed)
        assert pool.share_kept(since=hours / 2) >= TARGET
        assert pool.turns(since=hours / 2) <= 2

    holds()
