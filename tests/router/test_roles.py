"""Which engine changes its role, and when."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_pools import Fleet, idle, request

from diptych_router.choosing.roles import (
    ANSWER_S,
    OTHER,
    PAUSE_S,
    REST_S,
    WORTH,
    Demand,
    RoleTurns,
    Watch,
)
from diptych_router.engines.engine_table import Role

TICK_S = 0.2
HARDLY = 0.2
"""Demand that changes by this part of itself at most."""
parts = st.floats(0.0, 8.0)
demands = st.builds(Demand, st.floats(0.0, 1.0), parts, parts)
both = st.fixed_dictionaries({"prefill": demands, "decode": demands})


def play(
    seen: list[dict[Role, Demand]], engines: dict[Role, int], least: int = 1
) -> list[tuple[float, Role]]:
    """What follows from demand that is looked at again and again: when who got which role."""
    turns, found = RoleTurns(least), []
    for tick, demand in enumerate(seen):
        role = turns.due(demand, engines, tick * TICK_S)
        if role is not None:
            turns.turned(role, tick * TICK_S)
            engines[role] += 1
            engines[OTHER[role]] -= 1
            found.append((tick * TICK_S, role))
    return found


def times(demand: Mapping[Role, Demand], factor: float) -> dict[Role, Demand]:
    return {role: Demand(*(factor * part for part in each)) for role, each in demand.items()}


@given(both, st.lists(st.floats(1 - HARDLY, 1 + HARDLY), max_size=80), st.integers(2, 9),
       st.integers(2, 9))  # fmt: skip
def test_nobody_turns_back_while_demand_stays_about_the_same(
    demand: dict[Role, Demand], factors: list[float], prefill: int, decode: int
) -> None:
    seen = [times(demand, factor) for factor in factors]
    found = play(seen, {"prefill": prefill, "decode": decode})
    assert len({role for _, role in found}) <= 1
    assert (1 - HARDLY) / (1 + HARDLY) > WORTH**2  # why it holds


@given(st.lists(both, max_size=120), st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
def test_whatever_is_asked_turns_keep_their_distance_and_enough_of_each_role(
    seen: list[dict[Role, Demand]], prefill: int, decode: int, least: int
) -> None:
    engines: dict[Role, int] = {"prefill": prefill, "decode": decode}
    found = play(seen, engines, least)
    for (before, first), (at, second) in pairwise(found):
        assert at - before >= (PAUSE_S if first == second else REST_S) - 1e-9
    assert min(engines.values()) >= min(least, prefill, decode)


@pytest.mark.parametrize(
    ("prefill", "decode", "roles"),
    [
        (Demand(shared=0.5), Demand(shared=0.5), []),
        (Demand(shared=5.0), Demand(shared=0.5), ["prefill", "prefill"]),
        (Demand(shared=0.3), Demand(held=5.0), ["decode", "decode"]),
        (Demand(shared=9.0), Demand(shared=9.0), []),
        (Demand(shared=0.1), Demand(fixed=2.0, shared=0.1), []),
    ],
    ids=["calm", "prompts", "memory", "overload of both", "no engine could help"],
)
def test_engines_turn_to_the_role_that_lacks_them(
    prefill: Demand, decode: Demand, roles: list[Role]
) -> None:
    demand: dict[Role, Demand] = {"prefill": prefill, "decode": decode}
    assert [role for _, role in play([demand] * 50, {"prefill": 3, "decode": 3})] == roles


def test_a_strain_that_does_not_last_turns_nobody() -> None:
    calm: dict[Role, Demand] = {"prefill": Demand(), "decode": Demand()}
    burst: dict[Role, Demand] = {"prefill": Demand(shared=9.0), "decode": Demand()}
    assert not play([calm, burst, burst, calm] * 20, {"prefill": 2, "decode": 2})


# --- a router's tables --------------------------------------------------------------------------


def home_of(fleet: Fleet) -> dict[str, Role]:
    return {key: "prefill" if key[0] == "p" else "decode" for key in fleet.rows}


def test_an_engine_that_turned_keeps_its_numbers_its_prefixes_and_its_requests() -> None:
    fleet, view = Fleet(1, 2), request(4)
    assert view.keys is not None
    fleet.remembers("d1", view.keys(None))  # type: ignore[arg-type]
    fleet.rows["d1"].charge(70)
    assert fleet.table.turn("d1") == "prefill"
    fleet.rows["d1"].charge(-20)
    assert (fleet.rows["d1"]["open_tokens"], fleet.rows["d1"]["usable"]) == (50.0, 1.0)
    assert fleet.go(view) == ("d1", "d0"), "it remembers the prompt"
    assert fleet.table.turn("d1") == "decode"
    assert fleet.table.pairs.near.shape == (2, 1)
    assert fleet.go(request(4, start=100))[0] == "p0"


def strained(fleet: Fleet, watch: Watch) -> list[str]:
    """Many prompts wait, for a while."""
    found = []
    for tick in range(20):
        now = tick * TICK_S
        for row in fleet.table.tables["prefill"].rows:
            row.report(idle(queued_prompt_tokens=10**6), 0, now)
        key = watch.due(home_of(fleet), now)
        if key is not None:
            watch.turned(fleet.table.turn(key), now)
            found.append(key)
    return found


def test_a_role_that_nobody_takes_is_given_again_only_after_a_while() -> None:
    fleet = Fleet(1, 3)
    watch = Watch(fleet.table, 1, 1.0, 1.0)
    asked = []
    for tick in range(30):
        for row in fleet.table.tables["prefill"].rows:
            row.report(idle(queued_prompt_tokens=10**6), 0, tick * TICK_S)
        if watch.due(home_of(fleet), tick * TICK_S) is not None:
            asked.append(tick * TICK_S)
    assert len(asked) > 1
    assert all(b - a >= ANSWER_S - 1e-9 for a, b in pairwise(asked))


def test_only_the_first_router_gives_roles() -> None:
    fleet = Fleet(1, 3)
    fleet.rows["p0"].routers = 2, 1
    fleet.table.tables["prefill"].find_homes()
    watch = Watch(fleet.table, 1, 1.0, 1.0)
    assert strained(fleet, watch) == []
    fleet.rows["p0"].routers = 2, 0  # the first is gone
    fleet.table.tables["prefill"].find_homes()
    assert len(strained(fleet, watch)) == 2


def test_the_decode_engine_with_the_fewest_streams_computes_the_prompts_that_wait() -> None:
    fleet = Fleet(1, 3)
    for key, streams in (("d0", 9), ("d1", 2), ("d2", 5)):
        fleet.rows[key].report(idle(num_waiting_for_remote_kv=streams), 0, 0.0)
    assert strained(fleet, Watch(fleet.table, 1, 1.0, 1.0)) == ["d1", "d2"]


@pytest.mark.parametrize("why", ["a rollout", "nobody decodes"])
def test_roles_return_where_nobody_may_give_them(why: str) -> None:
    fleet = Fleet(1, 3)
    watch = Watch(fleet.table, 1, 1.0, 1.0)
    turned = strained(fleet, watch)
    assert len(turned) == 2
    match why:
        case "a rollout":
            fleet.table.is_up(fleet.rows["p0"], "another")
        case _:
            [row] = fleet.table.tables["decode"].rows
            row["usable"] = False
    back = []
    for tick in range(100, 110):
        key = watch.due(home_of(fleet), tick * TICK_S)
        if key is not None:
            fleet.table.turn(key)
            back.append(key)
    assert set(back) == (set(turned) if why != "nobody decodes" else set(back) & set(turned))
    assert back


def test_an_engine_that_has_turned_is_the_first_to_turn_back() -> None:
    fleet = Fleet(2, 2)
    watch = Watch(fleet.table, 1, 1.0, 1.0)
    [turned] = strained(fleet, watch)
    for row in fleet.table.tables["prefill"].rows:
        row.report(idle(queued_prompt_tokens=10 * (row.key == turned)), 0, 100.0)
    found = []
    for tick in range(20):
        now = 100.0 + tick * TICK_S
        for row in fleet.table.tables["decode"].rows:
            row.report(idle(num_running=9, num_waiting=9), 0, now)
        found.append(watch.due(home_of(fleet), now))
    assert next(key for key in found if key) == turned
