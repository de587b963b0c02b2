"""P's lease table: every transition, and the promises about blocks under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych_kv_transfer.actions import Action, Fence, LeaseEnded, Send, SendBlocks
from diptych_kv_transfer.leases import LIVE, MAX_REMEMBERED, TRANSITIONS, LeaseState, LeaseTable
from diptych_kv_transfer.messages import (
    Close,
    Closed,
    FromReader,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
)

LEASE_SECONDS = 30.0
D, STRANGER = 1, 2
BLOCKS = [4, 5, 6, 9]


def granted() -> LeaseTable:
    table = LeaseTable(LEASE_SECONDS)
    table.grant("lease", "request", BLOCKS, "digest", 0.0)
    return table


def opening(runs: list[tuple[int, int]] | None = None, digest: str = "digest") -> Open:
    return Open("lease", digest, 7, [(0, 3), (3, 1)] if runs is None else runs)


def reading() -> LeaseTable:
    table = granted()
    table.receive(D, opening(), 0.0)
    return table


def ended(outcome: str) -> LeaseEnded:
    return LeaseEnded("request", BLOCKS, outcome)


def state(table: LeaseTable) -> LeaseState:
    return table.leases["lease"].state


def test_an_open_claims_the_lease_and_sends_its_runs() -> None:
    table = granted()
    assert table.receive(D, opening(), 0.0) == [
        Send(D, Opened("lease")),
        SendBlocks(D, "lease", 7, [range(4, 7), range(9, 10)]),
    ]
    assert state(table) is LeaseState.READING


def test_an_open_of_nothing_sends_nothing() -> None:
    table = granted()
    assert table.receive(D, opening([]), 0.0) == [Send(D, Opened("lease"))]
    closed = table.receive(D, Close("lease", True), 0.0)
    assert closed == [Send(D, Closed("lease", held=True)), ended("released")]


def test_a_repeated_open_is_answered_but_not_sent_again() -> None:
    table = reading()
    assert table.receive(D, opening(), 1.0) == [Send(D, Opened("lease"))]


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (D, Open("nobody's", "digest", 7, [])),
        (D, opening(digest="of another prompt")),
        (D, opening([(0, 4)])),  # 6 and 9 are not neighbours
        (D, opening([(3, 2)])),
        (D, opening([(99, 1)])),
        (D, opening([(0, 2**40)])),
    ],
    ids=["unknown", "other prompt", "gap", "past the end", "beyond the end", "huge"],
)
def test_a_forged_open_is_refused_and_changes_nothing(peer: int, message: Open) -> None:
    table = granted()
    [answer] = table.receive(peer, message, 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)
    assert state(table) is LeaseState.GRANTED
    assert table.stale_reads_refused == 1


@pytest.mark.parametrize("peer", [D, STRANGER])
def test_a_second_and_different_open_is_refused(peer: int) -> None:
    table = reading()
    [answer] = table.receive(peer, opening([(0, 1)]), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)


def test_only_the_claimer_may_close() -> None:
    table = reading()
    answer = table.receive(STRANGER, Close("lease", True), 0.0)
    assert answer == [Send(STRANGER, Closed("lease", held=False))]
    assert state(table) is LeaseState.READING


def test_close_is_answered_at_once_but_blocks_wait_for_the_sends() -> None:
    table = reading()
    assert table.receive(D, Close("lease", True), 0.0) == [Send(D, Closed("lease", held=True))]
    assert table.sends_ended("lease") == [ended("released")]
    assert table.leases == {}


def test_a_repeated_close_gets_the_same_answer_and_nobody_else_does() -> None:
    table = reading()
    table.sends_ended("lease")
    table.receive(D, Close("lease", True), 0.0)
    again = Close("lease", True)
    assert table.receive(D, again, 1.0) == [Send(D, Closed("lease", held=True))]
    assert table.receive(STRANGER, again, 1.0) == [Send(STRANGER, Closed("lease", held=False))]


def test_an_ended_lease_cannot_be_opened() -> None:
    table = reading()
    table.sends_ended("lease")
    table.receive(D, Close("lease", True), 0.0)
    [answer] = table.receive(D, opening(), 1.0)
    assert answer == Send(D, Refused("lease", "the lease has released"))
    assert table.stale_reads_refused == 1


@pytest.mark.parametrize("how", ["reject", "revoke", "expiry", "peer lost"])
def test_a_read_that_was_overtaken_is_never_confirmed(how: str) -> None:
    table = reading()
    actions: list[Action] = {
        "reject": lambda: table.receive(D, Reject("lease"), 1.0),
        "revoke": lambda: table.revoke("lease"),
        "expiry": lambda: table.tick(LEASE_SECONDS),
        "peer lost": lambda: table.peer_lost(D),
    }[how]()
    if how != "peer lost":  # whose sends have ended with it
        assert actions == []
        actions = table.sends_ended("lease")
    assert actions == [ended("expired" if how == "expiry" else "revoked")]
    late = table.receive(D, Close("lease", True), LEASE_SECONDS)
    assert late == [Send(D, Closed("lease", held=False))]


def test_an_unread_lease_expires_on_time_and_not_before() -> None:
    table = granted()
    assert table.next_deadline() == LEASE_SECONDS
    assert table.tick(LEASE_SECONDS - 0.001) == []
    assert table.tick(LEASE_SECONDS) == [ended("expired")]
    assert table.next_deadline() == float("inf")


@pytest.mark.parametrize("table", [granted(), reading()], ids=["granted", "reading"])
def test_renewing_puts_expiry_off(table: LeaseTable) -> None:
    table.receive(D, Renew(["lease", "unknown"]), 20.0)
    assert table.tick(LEASE_SECONDS + 1) == []
    assert state(table) in LIVE


def test_losing_a_peer_leaves_leases_it_has_not_opened() -> None:
    table = granted()
    assert table.peer_lost(D) == []
    assert state(table) is LeaseState.GRANTED


def test_a_reader_that_never_drains_is_fenced_once() -> None:
    table = reading()
    table.tick(LEASE_SECONDS)
    assert table.tick(table.next_deadline()) == [Fence(D)]
    assert table.tick(1e9) == []
    assert table.peer_lost(D) == [ended("expired")]


@pytest.mark.parametrize("start", LeaseState)
@pytest.mark.parametrize("to", LeaseState)
def test_an_illegal_transition_raises_and_changes_nothing(
    start: LeaseState, to: LeaseState
) -> None:
    lease = granted().leases["lease"]
    lease.state = start
    if to in TRANSITIONS[start]:
        lease.become(to)
        assert lease.state is to
        return
    with pytest.raises(RuntimeError, match="request"):
        lease.become(to)
    assert lease.state is start


def test_the_memory_of_ended_leases_is_bounded() -> None:
    table = LeaseTable(LEASE_SECONDS)
    for number in range(MAX_REMEMBERED + 10):
        table.grant(f"{number}", "request", [1], "digest", 0.0)
        table.revoke(f"{number}")
    assert len(table._ended) == MAX_REMEMBERED


LEASES = st.sampled_from(["a", "b", "c"])
PEERS = st.sampled_from([D, STRANGER])


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Leases a, b, c of two blocks each under arbitrary messages, time and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(LEASE_SECONDS)
        self.now = 0.0
        self.sending: dict[str, int] = {}
        self.ended: list[str] = []
        self.granted: set[str] = set()
        for name in "abc":
            self.table.grant(name, name, [1, 2], "digest", 0.0)
            self.granted.add(name)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendBlocks(peer, lease_id, _, _):
                    assert lease_id not in self.sending, "sent twice"
                    self.sending[lease_id] = peer
                case LeaseEnded(request_id, _, _):
                    assert request_id not in self.sending, "given back while being sent"
                    assert request_id not in self.ended, "given back twice"
                    self.ended.append(request_id)
                case Send(_, Closed(lease_id, True)):
                    lease_state = self.table._ended[lease_id][0]
                    assert lease_state is LeaseState.RELEASED, "confirmed a read that was not held"

    def tell(self, peer: int, message: FromReader) -> None:
        self.do(self.table.receive(peer, message, self.now))

    @rule(peer=PEERS, lease=LEASES, runs=st.sampled_from([[], [(0, 2)], [(1, 1)], [(0, 3)]]))
    def open(self, peer: int, lease: str, runs: list[tuple[int, int]]) -> None:
        self.tell(peer, Open(lease, "digest", 1, runs))

    @rule(peer=PEERS, lease=LEASES, ok=st.booleans())
    def close(self, peer: int, lease: str, ok: bool) -> None:
        self.tell(peer, Close(lease, ok))

    @rule(peer=PEERS, lease=LEASES)
    def renew(self, peer: int, lease: str) -> None:
        self.tell(peer, Renew([lease]))

    @rule(peer=PEERS, lease=LEASES)
    def reject(self, peer: int, lease: str) -> None:
        self.tell(peer, Reject(lease))

    @rule(lease=LEASES)
    def revoke(self, lease: str) -> None:
        self.do(self.table.revoke(lease))

    @rule(lease=LEASES)
    def finish_sending(self, lease: str) -> None:
        if self.sending.pop(lease, None) is not None:
            self.do(self.table.sends_ended(lease))

    @rule(peer=PEERS)
    def lose(self, peer: int) -> None:
        self.sending = {lease: to for lease, to in self.sending.items() if to != peer}
        self.do(self.table.peer_lost(peer))

    @rule(seconds=st.sampled_from([0.0, 10.0, 31.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.table.tick(self.now))

    @invariant()
    def every_lease_is_pinned_or_given_back(self) -> None:
        assert set(self.table.leases) | set(self.ended) == self.granted
        assert not set(self.table.leases) & set(self.ended)

    def teardown(self) -> None:
        for peer in (D, STRANGER):
            self.lose(peer)
        self.now += 10 * LEASE_SECONDS
        self.do(self.table.tick(self.now))
        assert sorted(self.ended) == sorted(self.granted), "blocks leaked"


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
