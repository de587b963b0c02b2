"""D's load table: when a load ends, and what it takes to end well."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_kv_transfer.tables.actions import (
    Action,
    Connect,
    Fence,
    LoadEnded,
    ReceiveBlocks,
    Send,
    Stage,
)
from diptych_kv_transfer.tables.load import LeaseRef, Load, LoadState, coalesce
from diptych_kv_transfer.tables.loads import (
    RETRY_SECONDS,
    RETURN_SECONDS,
    STOP_SECONDS,
    LoadTable,
)
from diptych_kv_transfer.tables.messages import (
    Close,
    Closed,
    Hello,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
    Sending,
)
from diptych_protocol.engine_stats import MAX_MOVES_TOLD

ME = Hello("decode", "d1", {"dtype": "float32"})
P = Hello("prefill", "p1", {"dtype": "float32"})
ADDRESS = ("10.0.0.1", 5000)
LEASE = LeaseRef("lease", ADDRESS, "prefill", "p1")
PEER = 5
WANTED = {0: 10, 1: 11, 5: 3}
RUNS = [(0, 2), (5, 1)]
LOCAL = [range(10, 12), range(3, 4)]
TAG = 7
OPEN = Open("lease", "digest", TAG, RUNS)
OPENED = Opened("lease", TAG)
SENDING = Sending("lease", TAG, TAG, RUNS)
STOP = Send(PEER, Close("lease", False, TAG))
REJECT = Send(PEER, Reject("lease"))
NOT_HELD = Closed("lease", False, TAG)


def held() -> LoadTable:
    table = LoadTable(ME, load_timeout_s=60.0)
    assert table.hold("r", LEASE, 0.0) == [Connect(ADDRESS)]
    return table


def greeted(hello: Hello = P) -> LoadTable:
    table = held()
    assert table.connected(ADDRESS, PEER, 0.0) == [Send(PEER, ME)]
    table.greeted(PEER, hello, 0.0)
    return table


def start(table: LoadTable, *, early: bool = False) -> list[Action]:
    return table.start("r", LEASE, "digest", TAG, dict(WANTED), 1, 0.0, early=early)


def at(state: LoadState, hello: Hello = P, *, early: bool = False) -> LoadTable:
    """A table whose one load has come as far as `state`."""
    table = greeted(hello)
    if state is LoadState.HOLDING:
        return table
    opening = Open("lease", "digest", TAG, RUNS, early)
    assert start(table, early=early) == [Send(PEER, opening)]
    if state is LoadState.OPENING:
        return table
    assert table.receive(PEER, OPENED, 1.0) == []
    assert table.receive(PEER, SENDING, 1.0) == [ReceiveBlocks(PEER, "r", TAG, LOCAL)]
    if state is LoadState.RECEIVING:
        return table
    if state is LoadState.STOPPING:
        assert STOP in table.cancel("r", 1.0)
        return table
    assert received(table) == [Send(PEER, Close("lease", True, TAG))]
    if state is LoadState.CLOSING:
        return table
    assert only_end(table.receive(PEER, Closed("lease", True, TAG), 2.0)).ok
    return table


def received(table: LoadTable, tag: int = TAG, *, ok: bool = True) -> list[Action]:
    return table.receives_ended("r", tag, ok=ok, now=1.0)


def only_end(actions: list[Action]) -> LoadEnded:
    [ended] = [action for action in actions if isinstance(action, LoadEnded)]
    return ended


STARTED = [LoadState.OPENING, LoadState.RECEIVING, LoadState.CLOSING]


def test_a_load_succeeds_only_with_a_held_close() -> None:
    table = at(LoadState.CLOSING)
    assert table.receive(PEER, Closed("lease", True, TAG), 2.0) == [
        LoadEnded("r", True, "", num_blocks=3, seconds=2.0)
    ]
    assert table.loads == {}


def test_a_close_that_was_not_held_fails_the_load() -> None:
    ended = only_end(at(LoadState.CLOSING).receive(PEER, NOT_HELD, 2.0))
    assert not ended.ok
    assert ended.num_blocks == 0
    assert "lease" in ended.reason


def test_a_refusal_fails_the_load_with_its_reason() -> None:
    ended = only_end(at(LoadState.OPENING).receive(PEER, Refused("lease", "unknown", TAG), 1.0))
    assert (ended.ok, ended.reason) == (False, "unknown")


def test_nothing_wanted_closes_without_receiving() -> None:
    table = greeted()
    table.start("r", LEASE, "digest", TAG, {}, 1, 0.0)
    assert table.receive(PEER, OPENED, 0.0) == [Send(PEER, Close("lease", True, TAG))]


def test_a_load_started_before_the_greeting_opens_after_it() -> None:
    table = held()
    assert start(table) == []
    table.connected(ADDRESS, PEER, 0.0)
    assert table.greeted(PEER, P, 0.0) == [Send(PEER, OPEN)]


@pytest.mark.parametrize("state", STARTED)
def test_losing_the_peer_ends_the_load_once(state: LoadState) -> None:
    table = at(state)
    assert not only_end(table.peer_lost(PEER, 1.0)).ok
    assert table.peer_lost(PEER, 1.0) == []
    assert table.receive(PEER, Closed("lease", True, TAG), 1.0) == []


def test_a_failed_connect_ends_the_load_and_the_next_one_connects_anew() -> None:
    table = held()
    start(table)
    assert "refused" in only_end(table.connect_failed(ADDRESS, "refused", 0.0)).reason
    assert table.hold("next", LEASE, 0.0) == [Connect(ADDRESS)]


# --- engines whose leases outlive them ----------------------------------------------------------

KEEPER = Hello("prefill", "p1", P.compat, former=[])
SUCCESSOR = Hello("prefill", "p2", P.compat, former=["p1"])


def lost(state: LoadState, how: str, *, early: bool = False) -> LoadTable:
    """A load whose engine's leases outlive it, and whose connection was lost at second 1."""
    table = at(state, KEEPER, early=early)
    if how == "a transfer failed first":
        assert table.receives_ended("r", TAG, ok=False, now=1.0) == [STOP, REJECT]
    assert bool(table.peer_lost(PEER, 1.0)) == early
    return table


@pytest.mark.parametrize(
    ("state", "how"),
    [
        *((state, "at once") for state in STARTED),
        (LoadState.RECEIVING, "a transfer failed first"),
    ],
)
def test_a_load_begins_again_with_the_engine_that_goes_on_with_its_lease(
    state: LoadState, how: str
) -> None:
    table = lost(state, how)
    assert table.next_deadline() == 1.0 + RETRY_SECONDS
    for now in (1.5, 2.0, 2.5):
        assert table.tick(now) == [Connect(ADDRESS)]
        assert table.connect_failed(ADDRESS, "nobody is there", now) == []
    assert table.tick(2.9) == [Connect(ADDRESS)]
    table.connected(ADDRESS, PEER + 1, 2.9)
    [opened] = table.greeted(PEER + 1, SUCCESSOR, 2.9)
    assert opened == Send(PEER + 1, OPEN)
    assert table.receive(PEER, SENDING, 3.0) == [], "the one that is dead"
    assert table.receive(PEER + 1, OPENED, 3.0) == []
    again = ReceiveBlocks(PEER + 1, "r", TAG, LOCAL)
    assert table.receive(PEER + 1, SENDING, 3.0) == [again]
    assert received(table) == [Send(PEER + 1, Close("lease", True, TAG))]
    assert Fence(PEER + 1) not in table.tick(50.0)
    assert only_end(table.receive(PEER + 1, Closed("lease", True, TAG), 50.0)).ok
    assert table.tick(99.0) == []
    assert (table.totals.loads_started, table.totals.loads_completed) == (1, 1)


@pytest.mark.parametrize("state", STARTED)
def test_an_engine_that_does_not_come_back_is_waited_for_a_moment_only(state: LoadState) -> None:
    table = lost(state, "at once")
    assert table.tick(2.0) == [Connect(ADDRESS)]
    assert table.connect_failed(ADDRESS, "refused", 2.0) == []
    assert table.tick(0.9 + RETURN_SECONDS) == [Connect(ADDRESS)]
    assert not only_end(table.tick(1.0 + RETURN_SECONDS)).ok
    table = lost(state, "at once")
    assert table.tick(2.0) == [Connect(ADDRESS)]
    assert not only_end(table.connect_failed(ADDRESS, "refused", 1.0 + RETURN_SECONDS)).ok
    table = lost(state, "at once")
    assert table.tick(2.0) == [Connect(ADDRESS)]
    table.connected(ADDRESS, PEER, 2.0)  # and does not say who it is
    assert table.tick(1.0 + RETURN_SECONDS) == [Fence(PEER)]
    assert not only_end(table.peer_lost(PEER, 1.0 + RETURN_SECONDS)).ok


def test_an_engine_that_is_lost_again_is_not_waited_for_again() -> None:
    table = lost(LoadState.RECEIVING, "at once")
    table.tick(2.0)
    table.connected(ADDRESS, PEER, 2.0)
    assert table.greeted(PEER, SUCCESSOR, 2.0) == [Send(PEER, OPEN)]
    assert not only_end(table.peer_lost(PEER, 2.1)).ok


@pytest.mark.parametrize("broken", [False, True])
def test_a_cancelled_load_waits_for_nobody(broken: bool) -> None:
    table = at(LoadState.RECEIVING, KEEPER)
    if broken:
        table.receives_ended("r", TAG, ok=False, now=1.0)
    table.cancel("r", 1.0)
    assert not only_end(table.peer_lost(PEER, 1.0)).ok


def test_an_early_load_waits_for_nobody_and_opens_no_lease_of_a_former_engine() -> None:
    """It may be only promised, and promises end with their engine."""
    table = lost(LoadState.RECEIVING, "at once", early=True)
    assert table.loads == {}
    assert "restarted" in only_end(start(greeted(SUCCESSOR), early=True)).reason
    assert start(greeted(SUCCESSOR)) == [Send(PEER, OPEN)]


def test_an_engine_that_ended_its_leases_is_not_waited_for() -> None:
    table = lost(LoadState.OPENING, "at once")
    table.tick(2.0)
    table.connected(ADDRESS, PEER, 2.0)
    assert (
        "restarted" in only_end(table.greeted(PEER, Hello("prefill", "p2", P.compat), 2.0)).reason
    )
    assert ADDRESS not in table.keepers


def test_a_load_that_waits_for_an_engine_leaves_its_room_to_others() -> None:
    """Its blocks are staged, and the room is enough for one."""
    table = LoadTable(ME, 60.0, staging_bytes=8, copied_block_bytes=4)
    other = LeaseRef("other", ("10.0.0.2", 5000), "another", "a1")
    for n, (lease, hello) in enumerate(
        [(LEASE, KEEPER), (other, Hello("another", "a1", P.compat))]
    ):
        table.reach(lease.address)
        table.connected(lease.address, PEER + n, 0.0)
        table.greeted(PEER + n, hello, 0.0)
        asked = table.start(f"r{n}", lease, "digest", TAG + n, {0: 1, 1: 2}, 1, 0.0)
        assert bool(asked) == (n == 0)
    [stage, opened] = table.peer_lost(PEER, 1.0)
    assert isinstance(stage, Stage)
    assert opened == Send(PEER + 1, Open("other", "digest", TAG + 1, [(0, 2)]))


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        (Hello("prefill", "p2", P.compat), "restarted"),
        (Hello("prefill", "p2", P.compat, former=["p0"]), "restarted"),
        (Hello("another", "p2", P.compat, former=["p1"]), "restarted"),
        (Hello("another", "p1", P.compat), "restarted"),
        (Hello("prefill", "p1", {"dtype": "bfloat16"}), "dtype: 'bfloat16' there, 'float32' here"),
        (Hello("prefill", "p1", P.compat, version=1), "version 1"),
    ],
)
def test_the_wrong_engine_fails_the_load_by_name(hello: Hello, named: str) -> None:
    assert named in only_end(start(greeted(hello))).reason


@pytest.mark.parametrize("state", [LoadState.OPENING, LoadState.RECEIVING])
def test_a_cancelled_load_asks_p_to_stop_and_ends_when_nothing_is_on_its_way(
    state: LoadState,
) -> None:
    table = at(state)
    assert table.cancel("r", 1.0) == [STOP, REJECT]
    assert table.cancel("r", 1.0) == []
    assert table.receive(PEER, Opened("lease", TAG), 1.0) == []
    if state is LoadState.OPENING:  # it was on its way already, and P waits for it to be taken
        assert table.receive(PEER, SENDING, 1.0) == [ReceiveBlocks(PEER, "r", TAG, LOCAL)]
    assert table.receive(PEER, NOT_HELD, 1.0) == [], "P may still write"
    assert only_end(received(table)).reason == "cancelled"


def test_a_load_cancelled_while_it_closes_does_not_succeed() -> None:
    table = at(LoadState.CLOSING)
    assert table.cancel("r", 1.0) == []
    assert not only_end(table.receive(PEER, Closed("lease", True, TAG), 1.0)).ok


def test_cancelling_a_held_load_rejects_its_lease_and_reports_nothing() -> None:
    table = at(LoadState.HOLDING)
    assert table.cancel("r", 1.0) == [REJECT]
    assert table.loads == {}


def test_a_reject_waits_for_the_connection() -> None:
    table = LoadTable(ME, 60.0)
    assert table.reject(LEASE) == [Connect(ADDRESS)]
    table.connected(ADDRESS, PEER, 0.0)
    assert table.greeted(PEER, P, 0.0) == [REJECT]


@pytest.mark.parametrize("state", STARTED)
def test_an_overdue_load_is_stopped_first_and_fenced_only_if_p_does_not_answer(
    state: LoadState,
) -> None:
    table = at(state)
    assert Fence(PEER) not in table.tick(59.9)
    closing = state is LoadState.CLOSING
    assert table.tick(60.0) == ([] if closing else [STOP, REJECT])
    assert table.tick(59.9 + STOP_SECONDS) == []
    assert table.tick(60.0 + STOP_SECONDS) == [Fence(PEER)]
    assert Fence(PEER) not in table.tick(100.0)
    assert "60 s" in only_end(table.peer_lost(PEER, 1.0)).reason


def test_an_overdue_load_of_a_live_peer_harms_no_other() -> None:
    table = at(LoadState.RECEIVING)
    other = LeaseRef("other", ADDRESS, "prefill", "p1")
    table.start("s", other, "digest", 9, {0: 1}, 1, 55.0)
    assert table.tick(60.0) == [STOP, REJECT]
    assert table.receive(PEER, NOT_HELD, 60.1) == []
    assert only_end(received(table)).request_id == "r"
    assert list(table.loads) == ["s"]
    assert Fence(PEER) not in table.tick(114.9)


def test_a_peer_that_never_says_who_it_is_is_fenced() -> None:
    table = held()
    start(table)
    table.connected(ADDRESS, PEER, 0.0)
    assert table.tick(60.0) == [Fence(PEER)]


def test_a_peer_that_never_says_who_it_is_keeps_no_reject_for_ever() -> None:
    table = LoadTable(ME, 60.0)
    table.reject(LEASE)
    table.connected(ADDRESS, PEER, 1.0)
    assert table.next_deadline() == 61.0
    assert table.tick(60.9) == []
    assert table.tick(61.0) == [Fence(PEER)]
    assert table.next_deadline() == math.inf
    assert table.peer_lost(PEER, 1.0) == []
    assert (table.rejects, table.remotes) == ([], {})


def test_a_lease_that_ends_under_a_read_ends_the_load_after_its_receives() -> None:
    table = at(LoadState.RECEIVING)
    assert table.receive(PEER, NOT_HELD, 1.0) == []
    assert "while its blocks were read" in only_end(received(table)).reason


def test_receives_that_fail_stop_the_load() -> None:
    table = at(LoadState.RECEIVING)
    assert received(table, ok=False) == [STOP, REJECT]
    assert only_end(table.receive(PEER, NOT_HELD, 1.0)).reason == "receiving blocks failed"


@pytest.mark.parametrize(
    "runs",
    [[(0, 3)], [(2, 1)], [(0, 2), (0, 1)], [(0, 2), (5, 1), (1, 1)], [(0, 2**40)], [(5, 2)]],
    ids=repr,
)
def test_blocks_that_nobody_asked_for_are_not_received(runs: list[tuple[int, int]]) -> None:
    table = greeted()
    start(table)
    table.receive(PEER, OPENED, 1.0)
    assert table.receive(PEER, Sending("lease", TAG, TAG, runs), 1.0) == [STOP, REJECT]
    assert "protocol" in only_end(table.receive(PEER, NOT_HELD, 1.0)).reason


def test_blocks_may_come_in_any_parts_and_every_message_twice() -> None:
    table = greeted()
    start(table)
    actions: list[Action] = []
    for first, runs in ((TAG, [(1, 1)]), (TAG + 1, [(5, 1), (0, 1)])):
        for _ in range(2):
            table.receive(PEER, OPENED, 1.0)
            actions += table.receive(PEER, Sending("lease", TAG, first, runs), 1.0)
    assert actions == [
        ReceiveBlocks(PEER, "r", TAG, [range(11, 12)]),
        ReceiveBlocks(PEER, "r", TAG + 1, [range(3, 4), range(10, 11)]),
    ]
    assert received(table, TAG + 1) == []
    assert received(table, TAG) == [Send(PEER, Close("lease", True, TAG))]
    assert received(table, TAG) == []


def test_a_message_about_another_claim_is_ignored() -> None:
    table = at(LoadState.RECEIVING)
    assert table.receive(PEER, Closed("lease", False, TAG + 1), 1.0) == []
    assert table.loads["r"].problem == ""


# --- early loads ---------------------------------------------------------------------------------


def test_an_early_load_is_kept_until_it_is_adopted() -> None:
    table = at(LoadState.KEPT, early=True)
    assert (table.totals.loads_completed, table.in_flight) == (1, 0)
    assert sum(table.waits.hand_off_counts) == 0
    assert table.adopt("r", 3.0) == []
    assert table.loads == {}
    assert table.waits.hand_off_counts[0] == 1, "nobody waited"


def test_each_completed_load_is_told_with_its_sender_and_what_its_request_waited() -> None:
    table = LoadTable(ME, load_timeout_s=60.0)
    table.connected(ADDRESS, PEER, 0.0)
    table.greeted(PEER, P, 0.0)
    for number in range(MAX_MOVES_TOLD + 3):
        name, early = f"r{number}", number % 2 == 1
        lease = replace(LEASE, lease_id=name)
        table.start(name, lease, "digest", TAG, dict(WANTED), 1, 10.0 * number, early=early)
        opened = 10.0 * number + 1.0
        table.receive(PEER, Opened(name, TAG), opened)
        table.receive(PEER, Sending(name, TAG, TAG, RUNS), opened)
        table.receives_ended(name, TAG, ok=True, now=opened + 0.5)
        table.receive(PEER, Closed(name, number != 4, TAG), opened + 2.0)
        if early:
            table.adopt(name, opened + 3.0)
    told = list(table.waits.moves)
    assert len(told) == MAX_MOVES_TOLD
    last = MAX_MOVES_TOLD + 2  # one was not held, so it was no move
    assert [move.number for move in told] == list(range(last - MAX_MOVES_TOLD + 1, last + 1))
    assert {(move.sender, move.num_blocks) for move in told} == {("prefill", 3)}
    assert {move.seconds for move in told} == {3.0, 0.0}, "nobody waited for the early ones"
    assert {(move.moving_seconds, move.is_prefix) for move in told} == {(0.5, False)}
    assert [move.request_id for move in told] == [f"r{n}" for n in range(2, 19) if n != 4]


def test_an_early_load_that_nobody_adopts_ends_once_more() -> None:
    table = at(LoadState.KEPT, early=True)
    assert table.next_deadline() == 60.0
    [ended] = table.tick(60.0)
    assert ended == LoadEnded("r", False, "nobody came for it")
    assert table.loads == {}


def test_an_early_load_adopted_under_way_goes_on_like_any_other() -> None:
    table = at(LoadState.RECEIVING, early=True)
    assert table.adopt("r", 50.0) == []
    assert Fence(PEER) not in table.tick(109.0)
    received(table)
    ended = only_end(table.receive(PEER, Closed("lease", True, TAG), 109.5))
    assert (ended.ok, ended.seconds) == (True, 59.5)
    assert table.loads == {}


def test_an_early_load_asks_again_when_it_is_adopted_without_an_answer() -> None:
    table = at(LoadState.OPENING, early=True)
    assert table.adopt("r", 1.0) == [Send(PEER, OPEN)]
    assert "unknown" in only_end(table.receive(PEER, Refused("lease", "unknown", TAG), 1.0)).reason


@pytest.mark.parametrize("state", [LoadState.OPENING, LoadState.RECEIVING])
def test_an_early_load_that_is_given_up_leaves_the_lease_alone(state: LoadState) -> None:
    assert at(state, early=True).cancel("r", 1.0) == [STOP]
    assert at(state, early=True).tick(60.0) == [STOP]


def test_an_early_load_from_the_wrong_engine_leaves_the_lease_alone() -> None:
    [action] = start(greeted(Hello("prefill", "p2", P.compat)), early=True)
    assert isinstance(action, LoadEnded)


def test_a_kept_load_that_is_given_up_says_no_more() -> None:
    table = at(LoadState.KEPT, early=True)
    assert table.cancel("r", 3.0) == []
    assert table.loads == {}


def test_a_request_may_begin_anew_after_its_early_load_was_kept_but_not_while_it_is_under_way() -> (
    None
):
    table = at(LoadState.KEPT, early=True)
    assert start(table) == [Send(PEER, OPEN)]
    with pytest.raises(RuntimeError, match="started before"):
        start(table)


def test_a_queued_request_renews_its_lease() -> None:
    table = at(LoadState.HOLDING)
    assert table.next_deadline() == 10.0
    assert table.tick(10.0) == [Send(PEER, Renew(["lease"]))]
    assert table.next_deadline() == 20.0


def test_a_queued_request_that_lost_its_connection_connects_again() -> None:
    table = at(LoadState.HOLDING)
    assert table.peer_lost(PEER, 1.0) == []
    assert table.tick(10.0) == [Connect(ADDRESS)]
    table.connected(ADDRESS, PEER + 1, 0.0)
    table.greeted(PEER + 1, P, 10.0)
    assert start(table) == [Send(PEER + 1, OPEN)]


def test_a_load_under_way_renews_its_lease() -> None:
    assert Send(PEER, Renew(["lease"])) in at(LoadState.RECEIVING).tick(20.0)


def test_an_incompatible_engine_is_told_that_its_lease_is_not_needed() -> None:
    table = greeted(Hello("prefill", "p1", {"dtype": "bfloat16"}))
    assert REJECT in start(table)


def test_lease_seconds_from_outside_cannot_stop_the_clock() -> None:
    table = LoadTable(ME, 60.0)
    table.hold("nan", replace(LEASE, seconds=math.nan), 0.0)
    start(table)
    assert math.isfinite(table.next_deadline())


@given(st.lists(st.integers(0, 40), unique=True, max_size=30), st.data())
def test_runs_name_every_block_once_and_are_contiguous_on_both_sides(
    local: list[int], data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, 50), unique=True, min_size=len(local)))
    wanted = dict(zip(indices, local, strict=False))
    runs = coalesce(wanted)
    load = Load("r", LEASE, 0.0, wanted=dict(wanted))
    places = load.take(runs)
    pairs = [
        pair
        for (first, count), place in zip(runs, places, strict=True)
        for pair in zip(range(first, first + count), place, strict=True)
    ]
    assert pairs == list(wanted.items())
    assert load.wanted == {}


def test_neighbours_on_both_sides_become_one_run() -> None:
    assert coalesce({0: 1, 1: 2, 2: 3, 3: 9, 5: 10}) == [(0, 3), (3, 1), (5, 1)]
