"""Both tables joined by a wire of real bytes, with faults: what each end may conclude."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_kv_transfer.tables.actions import (
    Action,
    Connect,
    Fence,
    LeaseEnded,
    LoadEnded,
    ReceiveBlocks,
    Send,
    SendBlocks,
)
from diptych_kv_transfer.tables.lease import LeaseState, LeftLease
from diptych_kv_transfer.tables.leases import LeaseTable
from diptych_kv_transfer.tables.load import LeaseRef
from diptych_kv_transfer.tables.loads import RETURN_SECONDS, LoadTable
from diptych_kv_transfer.tables.messages import FromOwner, FromReader, Hello, decode, encode

ADDRESS = ("10.0.0.1", 5000)
P_HELLO = Hello("prefill", "p1", {"dtype": "float32"}, former=[])
D_HELLO = Hello("decode", "d1", {"dtype": "float32"})
LEASE_SECONDS, LOAD_SECONDS = 30.0, 60.0


BLOCKS = [4, 5, 9]
WANTED = {0: 10, 1: 11, 2: 20}


class Pair:
    """P and D of one request, one connection at a time, and the memory between them."""

    def __init__(self) -> None:
        self.p = LeaseTable(LEASE_SECONDS)
        self.hello, self.dead = P_HELLO, False
        self.d = LoadTable(D_HELLO, LOAD_SECONDS)
        self.now = 0.0
        self.to_p: deque[bytes] = deque()
        self.to_d: deque[bytes] = deque()
        self.connection = 0
        self.up = False
        self.sent: dict[int, list[range]] = {}
        """First tag -> runs, of the sends in flight."""
        self.wanted: dict[int, list[range]] = {}
        """The same of the receives."""
        self.p_memory = dict.fromkeys(BLOCKS, "not computed")
        self.d_memory: dict[int, str] = {}
        self.left: list[LeftLease] = []
        """What a killed P has left."""
        self.lease_ended: list[str] = []
        self.load_ended: list[LoadEnded] = []

    def die(self) -> None:
        """P's core is killed. A granted lease that has not ended outlives it, with its blocks."""
        if self.dead:
            return
        self.dead = True
        granted = self.p_memory == dict.fromkeys(BLOCKS, "kv")
        live, self.p = self.p.leases, LeaseTable(LEASE_SECONDS)
        self.cut()
        self.d_memory.clear()  # whatever has come, all comes again
        if not granted and not self.lease_ended:
            self.p_memory = dict.fromkeys(BLOCKS, "another request's")
            self.lease_ended.append("died")
        if not live or not granted:
            self.p.counts[LeaseState.PROMISED] = 1  # nobody will compute the prompt again
        self.left = [LeftLease("lease", "p1", "digest", BLOCKS)] if live and granted else []

    def rise(self) -> None:
        if not self.dead:
            return
        self.dead = False
        self.hello = Hello("prefill", "p2", P_HELLO.compat, former=[x.epoch for x in self.left])
        for lease in self.left:
            self.p.adopt(lease, self.now)

    def promise(self) -> None:
        if not self.p.counts and not self.dead:
            self.do_p(self.p.promise("lease", "request", len(BLOCKS), "digest", self.now))

    def compute(self) -> None:
        """One block more, and P says so; with the last one the lease is granted."""
        if self.dead:
            return
        self.promise()
        ready = sum(kv == "kv" for kv in self.p_memory.values()) + 1
        if self.lease_ended or ready > len(BLOCKS):
            return
        self.p_memory[BLOCKS[ready - 1]] = "kv"
        if ready < len(BLOCKS):
            self.do_p(self.p.lend("lease", BLOCKS[:ready]))
        else:
            self.do_p(self.p.grant("lease", BLOCKS, self.now))

    def start(self, *, early: bool = False) -> None:
        lease = LeaseRef("lease", ADDRESS, "prefill", "p1", LEASE_SECONDS)
        self.do_d(self.d.hold("request", lease, self.now))
        wanted = dict(WANTED)
        self.do_d(self.d.start("request", lease, "digest", 7, wanted, 1, self.now, early=early))

    def do_d(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Connect(address):
                    if self.dead:
                        self.do_d(self.d.connect_failed(address, "nobody is there", self.now))
                        continue
                    self.connection += 1
                    self.up = True
                    self.to_d.append(encode(self.hello))
                    self.do_d(self.d.connected(address, self.connection, self.now))
                case Send(_, message):
                    self.to_p.append(encode(message))
                case ReceiveBlocks(_, _, tag, runs):
                    self.wanted[tag] = runs
                case Fence(_):
                    self.cut()
                case LoadEnded():
                    assert not self.wanted, "blocks given back while a receive is posted"
                    if action.ok:
                        assert self.d_memory == dict.fromkeys(WANTED.values(), "kv"), "not read"
                    self.load_ended.append(action)

    def do_p(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(_, message):
                    self.to_d.append(encode(message))
                case SendBlocks(_, _, tag, runs):
                    assert tag not in self.sent
                    self.sent[tag] = runs
                case Fence(_):
                    self.cut()
                case LeaseEnded(_, _, outcome):
                    assert not self.sent, "blocks given back while being sent"
                    self.p_memory = dict.fromkeys(BLOCKS, "another request's")
                    self.lease_ended.append(outcome)

    def deliver_to_p(self, times: int = 1) -> None:
        if self.up and self.to_p:
            message = decode(self.to_p.popleft())
            for _ in range(times):
                if not isinstance(message, Hello):
                    self.do_p(self.p.receive(self.connection, cast(FromReader, message), self.now))

    def deliver_to_d(self, times: int = 1) -> None:
        if self.up and self.to_d:
            message = decode(self.to_d.popleft())
            for _ in range(times):
                if isinstance(message, Hello):
                    self.do_d(self.d.greeted(self.connection, message, self.now))
                else:
                    self.do_d(self.d.receive(self.connection, cast(FromOwner, message), self.now))

    def move_blocks(self) -> None:
        if not self.up or not self.sent.keys() & self.wanted.keys():
            return
        tag = min(self.sent.keys() & self.wanted.keys())
        for theirs, mine in zip(self.sent.pop(tag), self.wanted.pop(tag), strict=True):
            for source, target in zip(theirs, mine, strict=True):
                self.d_memory[target] = self.p_memory[source]
        self.do_p(self.p.sends_ended("lease", tag))
        self.do_d(self.d.receives_ended("request", tag, ok=True, now=self.now))

    def cut(self) -> None:
        if not self.up:
            return
        self.up = False
        self.sent.clear()
        self.wanted.clear()
        self.to_p.clear()
        self.to_d.clear()
        self.do_p(self.p.peer_lost(self.connection))
        self.do_d(self.d.peer_lost(self.connection, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do_p(self.p.tick(self.now))
        self.do_d(self.d.tick(self.now))

    def settle(self) -> None:
        """Let P finish and everything arrive that still can, then let all deadlines pass."""
        self.rise()
        for _ in range(50):
            self.compute()
            self.deliver_to_p()
            self.deliver_to_d()
            self.move_blocks()
        for _ in range(5):
            self.wait(LEASE_SECONDS + LOAD_SECONDS)


FAULTS: dict[str, Callable[[Pair], None]] = {
    "compute": Pair.compute,
    "promise": Pair.promise,
    "to P": Pair.deliver_to_p,
    "to P twice": lambda pair: pair.deliver_to_p(2),
    "to D": Pair.deliver_to_d,
    "to D twice": lambda pair: pair.deliver_to_d(2),
    "blocks": Pair.move_blocks,
    "cut": Pair.cut,
    "die": Pair.die,
    "rise": Pair.rise,
    "wait 1": lambda pair: pair.wait(1.0),
    "cancel": lambda pair: pair.do_d(pair.d.cancel("request", pair.now)),
    "adopt": lambda pair: pair.do_d(pair.d.adopt("request", pair.now)),
    "revoke": lambda pair: pair.do_p(pair.p.revoke("lease")),
    "wait 5": lambda pair: pair.wait(5.0),
    "wait 31": lambda pair: pair.wait(31.0),
    "wait 61": lambda pair: pair.wait(61.0),
}


@pytest.mark.parametrize("computed", range(len(BLOCKS) + 1))
def test_an_undisturbed_hand_off_releases_the_lease_and_succeeds(computed: int) -> None:
    """However much of the prompt was computed when D asked: all, some, or not even begun."""
    pair = Pair()
    for _ in range(computed):
        pair.compute()
    pair.start(early=computed < len(BLOCKS))
    for step in range(20):
        if step > 8:
            pair.compute()
        pair.deliver_to_p()
        pair.deliver_to_d()
        pair.move_blocks()
    assert pair.lease_ended == ["released"]
    assert [ended.ok for ended in pair.load_ended] == [True]


@pytest.mark.parametrize("point", range(1, 10))
@pytest.mark.parametrize("away", [0.0, RETURN_SECONDS / 2])
def test_an_engine_that_dies_after_the_grant_and_returns_costs_no_load(
    point: int, away: float
) -> None:
    pair = Pair()
    for _ in BLOCKS:
        pair.compute()
    pair.start()
    for _ in range(point):
        pair.deliver_to_p()
        pair.deliver_to_d()
        pair.move_blocks()
    released = pair.lease_ended == ["released"]
    pair.die()
    pair.wait(away)
    pair.rise()
    pair.wait(RETURN_SECONDS / 4)
    pair.settle()
    assert pair.lease_ended == ["released"]
    ended = [load.ok for load in pair.load_ended]
    assert ended == [True] or released, "P may die with the news that the lease was held"
    assert len(ended) == 1


@given(st.lists(st.sampled_from(sorted(FAULTS)), max_size=40), st.booleans())
@settings(max_examples=400)
def test_any_order_of_faults_ends_both_sides_once_and_never_uses_foreign_kv(
    steps: list[str], early: bool
) -> None:
    pair = Pair()
    if not early:
        for _ in BLOCKS:
            pair.compute()
    pair.start(early=early)
    for step in steps:
        FAULTS[step](pair)
        closes(pair.d)
    pair.settle()
    closes(pair.d)
    assert len(pair.lease_ended) == 1
    first, *more = pair.load_ended
    assert [ended.ok for ended in more] in ([], [False]), "a kept load may end once more"
    assert not more or (early and first.ok)
    assert pair.p.leases == {}
    assert pair.d.loads == {}


def closes(table: LoadTable) -> None:
    totals = table.totals
    ended = totals.loads_completed + totals.loads_failed
    assert totals.loads_started == ended + table.in_flight
