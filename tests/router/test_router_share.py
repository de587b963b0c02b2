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
    made.told(Heartbeat(1.0, follower=number, followers=count))
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
        for row in fleet.rows.values():
            for already, sent in ((0, 1), (own, 1 + of_all)):
                beat = Heartbeat(1.0, follower=number, followers=len(routers), requests=sent)
                row.heard(beat, already, 0.0)
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


def test_what_came_before_a_connection_is_not_counted() -> None:
    fleet = Fleet(2, 1)
    told([fleet, fleet], own=5, of_all=10)
    row, share_now = fleet.rows["p0"], fleet.table.tables["prefill"].share
    row.restarted()
    for own, of_all in ((2, 1_000_000), (4, 1_000_004)):
        row.heard(Heartbeat(1.0, followers=2, requests=of_all), own, 0.0)
        assert share_now.of_another == pytest.approx(1.0)


@pytest.mark.parametrize(("follower", "followers"), [(-3, 1 << 60), (1 << 60, -3), (5, 0)])
def test_an_engine_that_tells_impossible_numbers_of_routers_does_no_harm(
    follower: int, followers: int
) -> None:
    fleet = Fleet(3, 1)
    beat = Heartbeat(1.0, follower=follower, followers=followers, requests=1)
    fleet.rows["p0"].heard(beat, 0, 0.0)
    mine, others = share(follower, followers).homes(np.arange(3, dtype=np.uint64))
    assert mine.any()
    assert (others >= 0).all()
    assert len(set(burst([fleet], 3))) == 3
