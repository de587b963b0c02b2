"""D's load table: when a load ends, and what it takes to end well."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_kv_transfer.actions import Action, Connect, Fence, LoadEnded, ReceiveBlocks, Send
from diptych_kv_transfer.loads import LeaseRef, LoadState, LoadTable, coalesce
from diptych_kv_transfer.messages import (
    Close,
    Closed,
    Hello,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
)

ME = Hello("decode", "d1", {"dtype": "float32"})
P = Hello("prefill", "p1", {"dtype": "float32"})
ADDRESS = ("10.0.0.1", 5000)
LEASE = LeaseRef("lease", ADDRESS, "prefill", "p1")
PEER = 5
RUNS = [(0, 2), (5, 1)]
LOCAL = [range(10, 12), range(3, 4)]


def held() -> LoadTable:
    table = LoadTable(ME, load_timeout_s=60.0)
    assert table.hold("r", LEASE, 30.0, 0.0) == [Connect(ADDRESS)]
    return table


def greeted(hello: Hello = P) -> LoadTable:
    table = held()
    assert table.connected(ADDRESS, PEER) == [Send(PEER, ME)]
    table.greeted(PEER, hello, 0.0)
    return table


def start(table: LoadTable) -> list[Action]:
    return table.start("r", "digest", 7, RUNS, LOCAL, 0.0)


def at(state: LoadState) -> LoadTable:
    """A table whose one load has come as far as `state`."""
    table = greeted()
    if state is LoadState.HOLDING:
        return table
    assert start(table) == [Send(PEER, Open("lease", "digest", 7, RUNS))]
    if state is LoadState.OPENING:
        return table
    opened = table.receive(PEER, Opened("lease"), 1.0)
    assert opened == [ReceiveBlocks(PEER, "r", 7, LOCAL)]
    if state is LoadState.RECEIVING:
        return table
    assert table.receives_ended("r", ok=True) == [Send(PEER, Close("lease", ok=True))]
    return table


def only_end(actions: list[Action]) -> LoadEnded:
    [ended] = [action for action in actions if isinstance(action, LoadEnded)]
    return ended


STARTED = [LoadState.OPENING, LoadState.RECEIVING, LoadState.CLOSING]


def test_a_load_succeeds_only_with_a_held_close() -> None:
    table = at(LoadState.CLOSING)
    assert table.receive(PEER, Closed("lease", held=True), 2.0) == [
        LoadEnded("r", True, "", num_blocks=3, seconds=2.0)
    ]
    assert table.loads == {}


def test_a_close_that_was_not_held_fails_the_load() -> None:
    ended = only_end(at(LoadState.CLOSING).receive(PEER, Closed("lease", held=False), 2.0))
    assert not ended.ok
    assert ended.num_blocks == 0
    assert "lease" in ended.reason


def test_a_refusal_fails_the_load_with_its_reason() -> None:
    ended = only_end(at(LoadState.OPENING).receive(PEER, Refused("lease", "unknown lease"), 1.0))
    assert (ended.ok, ended.reason) == (False, "unknown lease")


def test_nothing_wanted_closes_without_receiving() -> None:
    table = greeted()
    table.start("r", "digest", 7, [], [], 0.0)
    assert table.receive(PEER, Opened("lease"), 0.0) == [Send(PEER, Close("lease", ok=True))]


def test_a_load_started_before_the_greeting_opens_after_it() -> None:
    table = held()
    assert start(table) == []
    table.connected(ADDRESS, PEER)
    assert table.greeted(PEER, P, 0.0) == [Send(PEER, Open("lease", "digest", 7, RUNS))]


@pytest.mark.parametrize("state", STARTED)
def test_losing_the_peer_ends_the_load_once(state: LoadState) -> None:
    table = at(state)
    assert not only_end(table.peer_lost(PEER)).ok
    assert table.peer_lost(PEER) == []
    assert table.receive(PEER, Closed("lease", held=True), 1.0) == []


def test_a_failed_connect_ends_the_load_and_the_next_one_connects_anew() -> None:
    table = held()
    start(table)
    assert "refused" in only_end(table.connect_failed(ADDRESS, "refused")).reason
    assert table.hold("next", LEASE, 30.0, 0.0) == [Connect(ADDRESS)]


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        (Hello("prefill", "p2", P.compat), "restarted"),
        (Hello("another", "p1", P.compat), "restarted"),
        (Hello("prefill", "p1", {"dtype": "bfloat16"}), "dtype: 'bfloat16' there, 'float32' here"),
        (Hello("prefill", "p1", P.compat, version=2), "version 2"),
    ],
)
def test_the_wrong_engine_fails_the_load_by_name(hello: Hello, named: str) -> None:
    assert named in only_end(start(greeted(hello))).reason


@pytest.mark.parametrize("state", [LoadState.OPENING, LoadState.RECEIVING])
def test_a_cancelled_load_keeps_its_blocks_until_receives_end(state: LoadState) -> None:
    table = at(state)
    assert table.cancel("r") == []
    if state is LoadState.OPENING:
        table.receive(PEER, Opened("lease"), 1.0)
    assert table.receives_ended("r", ok=True) == [Send(PEER, Close("lease", ok=False))]
    assert not only_end(table.receive(PEER, Closed("lease", held=True), 1.0)).ok


def test_cancelling_a_held_load_rejects_its_lease_and_reports_nothing() -> None:
    table = at(LoadState.HOLDING)
    assert table.cancel("r") == [Send(PEER, Reject("lease"))]
    assert table.loads == {}


def test_a_reject_waits_for_the_connection() -> None:
    table = LoadTable(ME, 60.0)
    assert table.reject(LEASE) == [Connect(ADDRESS)]
    table.connected(ADDRESS, PEER)
    assert table.greeted(PEER, P, 0.0) == [Send(PEER, Reject("lease"))]


@pytest.mark.parametrize("state", STARTED)
def test_an_overdue_load_fences_its_peer_before_it_ends(state: LoadState) -> None:
    table = at(state)
    assert Fence(PEER) not in table.tick(59.9)
    assert table.tick(60.0) == [Fence(PEER)]
    assert Fence(PEER) not in table.tick(100.0)
    assert "60 s" in only_end(table.peer_lost(PEER)).reason


def test_a_queued_request_renews_its_lease() -> None:
    table = at(LoadState.HOLDING)
    assert table.next_deadline() == 10.0
    assert table.tick(10.0) == [Send(PEER, Renew(["lease"]))]
    assert table.next_deadline() == 20.0


def test_a_load_under_way_renews_its_lease() -> None:
    assert Send(PEER, Renew(["lease"])) in at(LoadState.RECEIVING).tick(20.0)


def test_an_incompatible_engine_is_told_that_its_lease_is_not_needed() -> None:
    table = greeted(Hello("prefill", "p1", {"dtype": "bfloat16"}))
    assert Send(PEER, Reject("lease")) in start(table)


def test_lease_seconds_from_outside_cannot_stop_the_clock() -> None:
    table = LoadTable(ME, 60.0)
    table.hold("nan", LEASE, math.nan, 0.0)
    table.hold("r", LEASE, 30.0, 0.0)
    start(table)
    assert math.isfinite(table.next_deadline())


BLOCK_LISTS = st.lists(st.integers(0, 40), unique=True, max_size=30)


@given(BLOCK_LISTS, BLOCK_LISTS, st.data())
def test_runs_name_every_block_once_and_are_contiguous_on_both_sides(
    remote: list[int], local: list[int], data: st.DataObject
) -> None:
    wanted = data.draw(st.permutations(range(len(remote)))) if data.draw(st.booleans()) else None
    indices = list(range(len(remote)) if wanted is None else wanted)[: len(local)]
    local = local[: len(indices)]
    runs, local_runs = coalesce(indices, remote, local)
    pairs = []
    for (first, count), mine in zip(runs, local_runs, strict=True):
        theirs = remote[first : first + count]
        assert theirs == list(range(theirs[0], theirs[0] + count))
        pairs += zip(theirs, mine, strict=True)
    assert pairs == [(remote[index], block) for index, block in zip(indices, local, strict=True)]


def test_neighbours_on_both_sides_become_one_run() -> None:
    assert coalesce([0, 1, 2, 3], [7, 8, 9, 20], [1, 2, 3, 4]) == (
        [(0, 3), (3, 1)],
        [range(1, 4), range(4, 5)],
    )
