"""Routers that know of each other only through engines do not send to the same ones."""

from __future__ import annotations

from itertools import chain as chained

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_pools import Fleet, idle, request

from diptych_protocol.wire import Heartbeat
from diptych_router.engines.router_share import MOST_OTHERS, RouterShare


def share(number: int, count: int) -> RouterShare:
    made = RouterShare()
    made.told([(count, number)])
    return made


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40, unique=True), st.data())
def test_every_engine_is_the_home_of_some_router_and_all_agree(
    names: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 12))
    homes: list[set[int]] = []
    routers_of: dict[int, set[int]] = {name: set() for name in names}
    for number in range(count):
        order = data.draw(st.permutations(names))
        mine, others = share(number, count).homes(np.array(order, np.uint64))
        homes.append({name for name, home in zip(order, mine, strict=True) if home})
        for name, home, rest in zip(order, mine, others, strict=True):
            routers_of[name].add(int(home) + int(rest))
    assert set(chained.from_iterable(homes)) == set(names)
    assert max(map(len, homes)) - min(map(len, homes)) <= 1
    for name, told in routers_of.items():
        assert told == {sum(name in home for home in homes)}


@pytest.mark.parametrize(
    ("count", "own", "others", "expected"),
    [(1, 5, 0, 0.0), (2, 5, 5, 1.0), (4, 2, 6, 1.0), (4, 8, 0, 0.0), (2, 0, 9, 0.0),
     (2, 1, 99, MOST_OTHERS)],
)  # fmt: skip
def test_others_send_as_engines_have_told(
    count: int, own: int, others: int, expected: float
) -> None:
    made = share(0, count)
    made.received(own, others, 1.0)
    assert made.of_another == expected


def test_what_others_sent_long_ago_counts_no_more() -> None:
    made = share(0, 2)
    made.received(10, 1000, 0.0)
    made.received(10, 0, 60.0)
    assert made.of_another < 0.5


def burst(routers: list[Fleet], each: int) -> list[str | None]:
    return [
        fleet.go(request(50, start=10_000 * number + 100 * turn))[0]
        for turn in range(each)
        for number, fleet in enumerate(routers)
    ]


def told(routers: list[Fleet], *, own: int, of_all: int) -> None:
    for number, fleet in enumerate(routers):
        beats = [
            Heartbeat(1.0, follower=number, followers=len(routers), requests=requests)
            for requests in (1, 1 + of_all)
        ]
        for row in fleet.rows.values():
            row.heard(beats[0], 0, 0.0)
            row.heard(beats[1], own, 0.0)
            row.report(idle(), 0, 0.0)


@pytest.mark.parametrize(("prefill", "count", "each"), [(8, 4, 2), (8, 2, 4), (2, 4, 1), (3, 1, 3)])
def test_what_comes_to_routers_in_one_moment_is_spread(prefill: int, count: int, each: int) -> None:
    routers = [Fleet(prefill, 2) for _ in range(count)]
    told(routers, own=1, of_all=count)
    taken = burst(routers, each)
    assert {taken.count(engine) for engine in set(taken)} == {len(taken) // prefill}
    assert len(set(taken)) == prefill


def test_a_router_that_gets_all_requests_uses_all_engines() -> None:
    routers = [Fleet(4, 2) for _ in range(2)]
    told(routers, own=3, of_all=3)
    assert len(set(burst(routers[:1], 4))) == 4


def test_an_engine_that_starts_again_counts_from_zero() -> None:
    fleet = Fleet(2, 1)
    told([fleet, fleet], own=5, of_all=10)
    row = fleet.rows["p0"]
    row.restarted()
    row.heard(Heartbeat(1.0, followers=2, requests=4), 2, 0.0)
    told_now = fleet.table.tables["prefill"].share
    assert told_now.of_another == pytest.approx(1.0)


def test_what_came_before_this_router_says_nothing_of_the_others() -> None:
    fleet = Fleet(2, 1)
    row, share = fleet.rows["p0"], fleet.table.tables["prefill"].share
    row.heard(Heartbeat(1.0, followers=2, requests=1_000_000), 0, 0.0)
    row.heard(Heartbeat(1.0, followers=2, requests=1_000_004), 2, 0.0)
    assert share.of_another == pytest.approx(1.0)


def test_engines_that_disagree_leave_a_router_its_homes() -> None:
    """One counts no routers, and one has not heard of all: neither changes what the third says."""
    fleet = Fleet(3, 1)
    share = fleet.table.tables["prefill"].share
    for _ in range(2):
        for name, number, count in (("p0", 3, 4), ("p1", 0, 1), ("p2", 1, 2)):
            fleet.rows[name].heard(Heartbeat(1.0, follower=number, followers=count), 0, 0.0)
            assert (share.number, share.count) == (3, 4)
    fleet.rows["p0"].heard(Heartbeat(1.0, follower=0, followers=1), 0, 0.0)
    assert (share.number, share.count) == (1, 2), "the last word of each counts"


@pytest.mark.parametrize(("number", "count"), [(-7, 2), (9, 2), (0, -3), (2**60, 2**62)])
def test_whatever_an_engine_says_of_routers_can_be_divided(number: int, count: int) -> None:
    mine, others = share(number, count).homes(np.arange(3, dtype=np.uint64))
    assert mine.any()
    assert (others >= 0).all()


def test_answers_that_begin_in_one_moment_do_not_all_go_to_the_engine_that_was_told_least() -> None:
    """No router knows what the others have sent since it told so."""
    routers = [Fleet(2, 8) for _ in range(8)]
    told(routers, own=1, of_all=8)
    for fleet in routers:
        for number in range(8):
            fleet.rows[f"d{number}"].report(idle(num_running=40 + number % 2), 0, 0.0)
    taken = [fleet.go(request(50, start=10_000 * n))[1] for n, fleet in enumerate(routers)]
    assert max(taken.count(engine) for engine in set(taken)) <= 2
