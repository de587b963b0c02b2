"""Who is near to whom, how fast KV moves between them, and what a router makes of it."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from toy_pools import EngineView, fleet_of

from diptych_protocol.engine_stats import MAX_MOVES_TOLD, KVTransferStats, Move, SchedulerStats
from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.choosing.policies import POLICIES
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.engines.engine_table import TRIP_PRIOR, EngineRow
from diptych_router.engines.pair_rates import (
    FADING_S,
    MOST_TIMES,
    NOWHERE,
    WORDS,
    Floats,
    Location,
    Nearness,
    PairRates,
    nearness,
)

SIZE = 16
TOKENS = 4000
LONG = RequestView(TOKENS, 100.0)
TRIP_S, TOKEN_S = TRIP_PRIOR
USUAL = TRIP_S + TOKENS * TOKEN_S
A, B = Location("n1", "a"), Location("n2", "b")


@each(
    ("one", "other", "near"),
    [
        (Location("n", "a"), Location("n", "a"), Nearness.NODE),
        (Location("n", ""), Location("n", ""), Nearness.NODE),
        (Location("n", "a"), Location("m", "a"), Nearness.ZONE),
        (Location("", "a"), Location("", "a"), Nearness.ZONE),
        (Location("n", "a"), Location("m", "b"), Nearness.APART),
        (Location("n", "a"), Location("m", ""), Nearness.UNKNOWN),
        (Location("n", ""), Location("m", ""), Nearness.UNKNOWN),
        (NOWHERE, NOWHERE, Nearness.UNKNOWN),
    ],
)
def test_how_near_engines_are_follows_from_their_nodes_and_zones(
    one: Location, other: Location, near: Nearness
) -> None:
    assert nearness(one, other) == nearness(other, one) == near
    assert len(WORDS) == len(Nearness)


def pairs_of(senders: list[Location], receivers: list[Location]) -> PairRates:
    """Senders `p0`, `p1`… and receivers."""
    pairs = PairRates()
    for _ in senders:
        pairs.add(sends=True)
    for _ in receivers:
        pairs.add(sends=False)
    trips = usual(len(receivers))
    for at, location in enumerate(senders):
        pairs.is_at(at, f"p{at}", location, trips, sends=True)
    for at, location in enumerate(receivers):
        pairs.is_at(at, f"d{at}", location, trips, sends=False)
    return pairs


def usual(receivers: int) -> Floats:
    return np.tile(np.array(TRIP_PRIOR)[:, np.newaxis], receivers)


def moves(sender: str, seconds: float, count: int = 1, first: int = 1) -> list[Move]:
    return [Move(first + n, sender, TOKENS // SIZE, seconds) for n in range(count)]


def saw(pairs: PairRates, receiver: int, told: list[Move], now: float = 0.0) -> None:
    pairs.saw(receiver, told, SIZE, usual(pairs.near.shape[0]), now)


def rates(pairs: PairRates) -> list[list[float]]:
    """[receivers][senders] Times as slow as usual."""
    number = pairs.near.shape[0]
    ways = pairs.ways(np.ones(number), usual(number)[1])
    assert ways.token_s is not None
    return [[token_s / TOKEN_S for token_s in row] for row in ways.token_s.tolist()]


def test_a_pair_is_known_by_its_own_moves_and_others_are_not() -> None:
    pairs = pairs_of([NOWHERE] * 2, [NOWHERE] * 2)
    assert not any((pairs.learned, pairs.placed)), "nothing is known"
    saw(pairs, 1, moves("p0", 5 * USUAL, 100))
    assert rates(pairs) == [[1.0, 1.0], [pytest.approx(5.0, rel=0.1), 1.0]]


def test_few_moves_of_a_pair_count_little() -> None:
    pairs = pairs_of([NOWHERE], [NOWHERE])
    seen = [1.0]
    for number in range(6):
        saw(pairs, 0, moves("p0", 10 * USUAL, 1, number))
        seen.append(rates(pairs)[0][0])
    assert seen == sorted(seen)
    assert seen[1] < 2.5
    assert seen[-1] > 4.0


def test_a_pair_that_has_told_nothing_is_known_by_those_that_are_as_near() -> None:
    """Two zones; only the first pairs of them have moved anything."""
    pairs = pairs_of([A, A, B], [A, A, B])
    saw(pairs, 0, [*moves("p0", USUAL / 2, 50), *moves("p2", 8 * USUAL, 50)])
    known = rates(pairs)
    assert known[1][1] == pytest.approx(0.5, rel=0.2)
    assert known[1][2] == pytest.approx(8.0, rel=0.2)
    assert known[2][0] == known[2][1] == pytest.approx(8.0, rel=0.2)
    pairs.add(sends=True)
    pairs.is_at(3, "p3", B, usual(3), sends=True)
    assert rates(pairs)[0][3] == pytest.approx(8.0, rel=0.2), "also of one that comes later"


def test_a_pair_differs_from_those_as_near_when_its_moves_do() -> None:
    pairs = pairs_of([A, A], [A, A])
    for number in range(40):
        for receiver, sender in product((0, 1), ("p0", "p1")):
            slow = (receiver, sender) == (1, "p1")
            saw(pairs, receiver, moves(sender, (6 if slow else 1) * USUAL, 1, number))
    known = rates(pairs)
    assert known[1][1] > 3 * max(known[0][0], known[0][1], known[1][0])


def test_what_a_pair_was_is_forgotten_in_time() -> None:
    pairs = pairs_of([NOWHERE], [NOWHERE])
    saw(pairs, 0, moves("p0", 10 * USUAL, 50))
    assert rates(pairs)[0][0] > 5
    saw(pairs, 0, [], now=10 * FADING_S)
    assert rates(pairs)[0][0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("location", [B, A], ids=["elsewhere", "another name"])
def test_of_another_engine_at_an_address_nothing_is_known(location: Location) -> None:
    pairs = pairs_of([A, A], [NOWHERE])
    saw(pairs, 0, [*moves("p0", 10 * USUAL, 50), *moves("p1", 10 * USUAL, 50)])
    pairs.is_at(0, "p0" if location == B else "p9", location, usual(1), sends=True)
    known = rates(pairs)[0]
    assert known[0] == 1.0
    assert known[1] > 5


def test_those_after_one_that_is_gone_keep_what_is_known_of_them() -> None:
    pairs = pairs_of([A, B, A], [A, B, B])
    saw(pairs, 2, moves("p2", 10 * USUAL, 50))
    before = rates(pairs)
    pairs.remove(0, sends=True)
    pairs.remove(1, sends=False)
    assert rates(pairs) == [[row[1], row[2]] for row in (before[0], before[2])]
    saw(pairs, 1, moves("p2", USUAL / 10, 200))
    assert rates(pairs)[1][1] < before[2][2] / 2


@each(
    "move",
    [
        Move(1, "stranger", 250, 0.1),
        Move(1, "p0", 250, -1.0),
        Move(1, "p0", 250, math.nan),
        Move(1, "p0", 250, math.inf),
        Move(1, "p0", 250, 1e9),
        Move(1, "p0", 0, 0.1),
        Move(1, "p0", -5, 0.1),
        Move(1, "p0", 1 << 62, 0.1),
    ],
    ids=repr,
)
def test_what_cannot_be_true_teaches_nothing(move: Move) -> None:
    pairs = pairs_of([NOWHERE], [NOWHERE])
    saw(pairs, 0, [move])
    assert not pairs.learned


told_moves = st.builds(
    Move,
    st.integers(-(1 << 62), 1 << 62),
    st.sampled_from(["p0", "p1", "p2", "stranger"]),
    st.integers(-(1 << 62), 1 << 62) | st.integers(0, 1000),
    st.floats() | st.floats(0, 1),
)


@given(st.lists(st.tuples(st.integers(0, 2), told_moves, st.floats(-1e6, 1e6)), max_size=30))
def test_rates_are_finite_positive_and_bounded_whatever_is_told(
    told: list[tuple[int, Move, float]],
) -> None:
    pairs = pairs_of([A, B, NOWHERE], [A, B, NOWHERE])
    for receiver, move, now in told:
        saw(pairs, receiver, [move], now)
        if pairs.learned:
            known = np.array(rates(pairs))
            assert np.isfinite(known).all()
            assert (known > 0).all()
            assert (known <= MOST_TIMES * (1 + 1e-3)).all()


def test_a_fleet_may_grow_and_shrink() -> None:
    pairs = pairs_of([A] * 67, [B] * 133)
    saw(pairs, 132, moves("p66", 10 * USUAL, 50))
    assert rates(pairs)[-1][-1] > 5
    for _ in range(128):
        pairs.remove(0, sends=False)
    assert pairs.near.shape == (5, 67)
    assert rates(pairs)[-1][-1] > 5


# --- what a router makes of it -------------------------------------------------------------------


class Fleet:
    """Pools of engines `p0`, `p1`… and `d0`, `d1`… at places."""

    def __init__(
        self,
        prefill: list[Location],
        decode: list[Location],
        policy: str = "prefix_aware",
        seed: int = 0,
    ) -> None:
        first, second = (
            [EngineView(f"{letter}{number}", "f") for number in range(len(places))]
            for letter, places in (("p", prefill), ("d", decode))
        )
        draw = Random(seed).randrange
        self.table: FleetTable = fleet_of(first, second, POLICIES[policy], draw, "always")
        self.rows: dict[str, EngineRow] = {}
        for table, places in zip(self.table.tables.values(), (prefill, decode), strict=True):
            for row, location in zip(table.rows, places, strict=True):
                self.rows[row.key] = row
                row["block_size"] = SIZE
                self.table.is_up(row, "f", row.key, location)
                self.report(row.key)

    def report(self, key: str, *told: Move, now: float = 0.0, **facts: Any) -> None:
        transfer = KVTransferStats(newest_moves=list(told))
        stats = SchedulerStats(blocks_total=9999, blocks_free=9999, kv_transfer=transfer, **facts)
        self.rows[key].report(stats, 0, now)

    def choose(self, view: RequestView = LONG) -> Decision:
        decision = self.table.choose(view, 0.0)
        assert decision is not None
        return decision

    def choices(self, count: int = 50, view: RequestView = LONG) -> set[tuple[str, str]]:
        found = [self.choose(view) for _ in range(count)]
        return {(str(decision.prefill), decision.decode) for decision in found}


NEAR = {("p0", "d0"), ("p1", "d1")}


def test_of_equal_engines_the_nearest_ones_form_a_pair_before_anything_was_learned() -> None:
    assert Fleet([A, B], [A, B]).choices() == NEAR
    assert len(Fleet([NOWHERE] * 2, [NOWHERE] * 2).choices()) == 4


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_a_policy_that_counts_no_seconds_asks_for_no_places(policy: str) -> None:
    fleet = Fleet([A, B], [A, B], policy)
    fleet.report("d0", *moves("p0", 10 * USUAL, MAX_MOVES_TOLD))
    assert len(fleet.choices()) == 4


def test_long_prompts_avoid_slow_ways_and_short_ones_do_not() -> None:
    """p0 sends to d0 slowly; nobody has told where they are. d1 has a little more to do."""
    fleet = Fleet([NOWHERE], [NOWHERE] * 2)
    for number in range(6):
        first = 1 + number * MAX_MOVES_TOLD
        fleet.report("d0", *moves("p0", 30 * USUAL, MAX_MOVES_TOLD, first))
    fleet.report("d1", num_running=2)
    assert fleet.choices() == {("p0", "d1")}
    assert fleet.choices(view=RequestView(16, 100.0)) == {("p0", "d0")}


def test_both_engines_of_a_slow_pair_have_other_partners() -> None:
    fleet = Fleet([NOWHERE] * 2, [NOWHERE] * 2)
    for number in range(6):
        first = 1 + number * MAX_MOVES_TOLD
        fleet.report("d0", *moves("p0", 30 * USUAL, MAX_MOVES_TOLD, first))
    assert fleet.choices() == {("p0", "d1"), ("p1", "d0"), ("p1", "d1")}


def test_senders_that_are_faster_than_all_that_the_receiver_is_used_to_can_be_chosen() -> None:
    """Then a prompt costs less than nothing there, because the usual time is in decode's costs."""
    fleet = Fleet([NOWHERE] * 2, [NOWHERE])
    fleet.report("d0", *moves("p0", USUAL, MAX_MOVES_TOLD))
    fleet.rows["d0"]["trip_token_s"] = 1.0
    assert fleet.choices() <= {("p0", "d0"), ("p1", "d0")}


def test_a_far_engine_takes_over_where_the_near_ones_have_more_to_do_than_the_way_costs() -> None:
    fleet = Fleet([A], [A, B])
    for number in range(4):
        first = 1 + number * MAX_MOVES_TOLD
        fleet.report("d0", *moves("p0", USUAL, MAX_MOVES_TOLD, first))
        fleet.report("d1", *moves("p0", 20 * USUAL, MAX_MOVES_TOLD, first))
    assert fleet.choices() == {("p0", "d0")}
    fleet.report("d0", num_running=200)
    assert fleet.choices() == {("p0", "d1")}
    terms = fleet.choose().terms
    assert terms["transfer_s"] == pytest.approx(TRIP_S + 20 * TOKENS * TOKEN_S, rel=0.2)


def test_candidates_say_how_near_they_are_and_what_the_way_from_the_chosen_one_costs() -> None:
    fleet = Fleet([A], [A, Location("n3", "a"), B, NOWHERE])
    fleet.report("d2", *moves("p0", 30 * USUAL, MAX_MOVES_TOLD))
    decision = fleet.choose()
    first, second = decision.weighed
    assert [second.near(at) for at in range(4)] == ["same node", "same zone", "other zone", ""]
    assert first.near(0) == ""
    assert decision.decode == "d0"
    for at in range(4):
        assert second.cost(at) == pytest.approx(sum(second.terms(at).values()))
    assert second.terms(2)["transfer_s"] > 3 * second.terms(0)["transfer_s"]
    assert decision.terms["transfer_s"] == second.terms(0)["transfer_s"]


def test_a_move_is_counted_once_however_often_it_is_told() -> None:
    fleet = Fleet([NOWHERE], [NOWHERE])
    for _ in range(50):
        fleet.report("d0", *moves("p0", 10 * USUAL, 1))
    assert rates(fleet.table.pairs)[0][0] < 2.5


def test_more_moves_in_one_message_than_may_be_told_are_left_out() -> None:
    fleet = Fleet([NOWHERE], [NOWHERE])
    fleet.report("d0", *moves("p0", 10 * USUAL, 1000), *moves("p0", USUAL, MAX_MOVES_TOLD, 1001))
    assert rates(fleet.table.pairs)[0][0] == pytest.approx(1.0)


def test_a_prefix_is_fetched_from_the_nearest_of_those_that_have_it() -> None:
    fleet = Fleet([A, B, B], [A])
    places = [fleet.table.pairs.location(at, sends=True) for at in range(3)]
    assert places == [A, B, B]
    assert fleet.table.nearest("d0", ["p0", "p1", "p2"]) == ["p0"]
    assert fleet.table.nearest("p1", ["p0", "p2", "d0"]) == ["p2"]
    assert fleet.table.nearest("p1", ["p0", "d0"]) == ["p0", "d0"]


places = st.sampled_from([A, B, Location("n3", "a"), Location("n4", "c"), NOWHERE])
times = st.sampled_from([0.2, 1.0, 5.0, 20.0])


@given(
    st.lists(st.tuples(places, st.integers(0, 5000)), min_size=1, max_size=5),
    st.lists(st.tuples(places, st.integers(0, 60)), min_size=1, max_size=5),
    st.data(),
)
def test_the_pair_costs_at_most_as_much_as_the_best_partner_of_either_cheapest_engine(
    prefill: list[tuple[Location, int]], decode: list[tuple[Location, int]], data: st.DataObject
) -> None:
    """And the difference between the terms of any two pairs is that of their ways."""
    fleet = Fleet([location for location, _ in prefill], [location for location, _ in decode])
    for at, (_, queued) in enumerate(prefill):
        fleet.report(f"p{at}", queued_prompt_tokens=queued)
    for at, (_, running) in enumerate(decode):
        told = [
            move
            for sender in range(len(prefill))
            for move in moves(f"p{sender}", data.draw(times) * USUAL, 3, 1 + 3 * sender)
        ]
        fleet.report(f"d{at}", *told, num_running=running)
    decision = fleet.choose()
    first, second = decision.weighed
    number = len(decode)
    ways = fleet.table.pairs.ways(np.full(number, float(TOKENS)), usual(number)[1])
    assert ways.token_s is not None
    (p,) = [at for at in range(len(prefill)) if f"p{at}" == decision.prefill]
    others = np.array([second.cost(d) for d in range(number)]) - TOKENS * ways.token_s[:, p]
    cost = [
        [first.cost(s) + others[d] + TOKENS * ways.token_s[d, s] for d in range(number)]
        for s in range(len(prefill))
    ]
    total = sum(decision.terms.values())
    alike = 1.1 * min(first.cost(s) for s in range(len(prefill)))
    starts = [min(row) for s, row in enumerate(cost) if first.cost(s) <= alike]
    assert total <= 1.1 * max(starts) + 1e-9
    assert total >= min(map(min, cost)) - 1e-9
