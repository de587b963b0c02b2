"""Both tables joined by a wire of real bytes, with faults: what each end may conclude."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_kv_transfer.actions import (
    Action,
    Connect,
    Fence,
    LeaseEnded,
    LoadEnded,
    ReceiveBlocks,
    Send,
    SendBlocks,
)
from diptych_kv_transfer.leases import LeaseTable
from diptych_kv_transfer.loads import LeaseRef, LoadTable
from diptych_kv_transfer.messages import FromOwner, FromReader, Hello, decode, encode

ADDRESS = ("10.0.0.1", 5000)
P_HELLO = Hello("prefill", "p1", {"dtype": "float32"})
D_HELLO = Hello("decode", "d1", {"dtype": "float32"})
LEASE_SECONDS, LOAD_SECONDS = 30.0, 60.0


class Pair:
    """P and D of one request, one connection at a time, and the memory between them."""

    def __init__(self) -> None:
        self.p = LeaseTable(LEASE_SECONDS)
        self.d = LoadTable(D_HELLO, LOAD_SECONDS)
        self.now = 0.0
        self.to_p: deque[bytes] = deque()
        self.to_d: deque[bytes] = deque()
        self.connection = 0
        self.up = False
        self.sent: list[range] | None = None
        self.wanted: list[range] | None = None
        self.p_memory = {4: "kv", 5: "kv"}
        self.d_memory: dict[int, str] = {}
        self.lease_ended: list[str] = []
        self.load_ended: list[LoadEnded] = []
        self.p.grant("lease", "request", [4, 5], "digest", 0.0)

    def start(self) -> None:
        lease = LeaseRef("lease", ADDRESS, "prefill", "p1")
        self.do_d(self.d.hold("request", lease, LEASE_SECONDS, self.now))
        self.do_d(self.d.start("request", "digest", 7, [(0, 2)], [range(10, 12)], self.now))

    def do_d(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Connect(address):
                    self.connection += 1
                    self.up = True
                    self.to_d.append(encode(P_HELLO))
                    self.do_d(self.d.connected(address, self.connection))
                case Send(_, message):
                    self.to_p.append(encode(message))
                case ReceiveBlocks(_, _, _, runs):
                    self.wanted = runs
                case Fence(_):
                    self.cut()
                case LoadEnded():
                    assert self.wanted is None, "blocks given back while a receive is posted"
                    if action.ok:
                        assert self.d_memory == {10: "kv", 11: "kv"}, "used what was not read"
                    self.load_ended.append(action)

    def do_p(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(_, message):
                    self.to_d.append(encode(message))
                case SendBlocks(_, _, _, runs):
                    self.sent = runs
                case Fence(_):
                    self.cut()
                case LeaseEnded(_, block_ids, outcome):
                    assert self.sent is None, "blocks given back while being sent"
                    self.p_memory = dict.fromkeys(block_ids, "another request's")
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
        if not self.up or self.sent is None or self.wanted is None:
            return
        for theirs, mine in zip(self.sent, self.wanted, strict=True):
            for source, target in zip(theirs, mine, strict=True):
                self.d_memory[target] = self.p_memory[source]
        self.sent = self.wanted = None
        self.do_p(self.p.sends_ended("lease"))
        self.do_d(self.d.receives_ended("request", ok=True))

    def cut(self) -> None:
        if not self.up:
            return
        self.up = False
        self.sent = self.wanted = None
        self.to_p.clear()
        self.to_d.clear()
        self.do_p(self.p.peer_lost(self.connection))
        self.do_d(self.d.peer_lost(self.connection))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do_p(self.p.tick(self.now))
        self.do_d(self.d.tick(self.now))

    def settle(self) -> None:
        """Let everything arrive that still can, then let all deadlines pass."""
        for _ in range(50):
            self.deliver_to_p()
            self.deliver_to_d()
            self.move_blocks()
        for _ in range(5):
            self.wait(LEASE_SECONDS + LOAD_SECONDS)


FAULTS: dict[str, Callable[[Pair], None]] = {
    "to P": Pair.deliver_to_p,
    "to P twice": lambda pair: pair.deliver_to_p(2),
    "to D": Pair.deliver_to_d,
    "to D twice": lambda pair: pair.deliver_to_d(2),
    "blocks": Pair.move_blocks,
    "cut": Pair.cut,
    "cancel": lambda pair: pair.do_d(pair.d.cancel("request")),
    "revoke": lambda pair: pair.do_p(pair.p.revoke("lease")),
    "wait 5": lambda pair: pair.wait(5.0),
    "wait 31": lambda pair: pair.wait(31.0),
    "wait 61": lambda pair: pair.wait(61.0),
}


def test_an_undisturbed_hand_off_releases_the_lease_and_succeeds() -> None:
    pair = Pair()
    pair.start()
    for _ in range(10):
        pair.deliver_to_p()
        pair.deliver_to_d()
        pair.move_blocks()
    assert pair.lease_ended == ["released"]
    assert [ended.ok for ended in pair.load_ended] == [True]


@given(st.lists(st.sampled_from(sorted(FAULTS)), max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_order_of_faults_ends_both_sides_once_and_never_uses_foreign_kv(
    steps: list[str],
) -> None:
    pair = Pair()
    pair.start()
    for step in steps:
        FAULTS[step](pair)
    pair.settle()
    assert len(pair.lease_ended) == 1
    assert len(pair.load_ended) == 1
    assert pair.p.leases == {}
    assert pair.d.loads == {}
