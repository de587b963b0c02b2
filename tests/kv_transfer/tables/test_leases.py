"""P's lease table: every transition, and the promises about blocks under any order of events."""

from __future__ import annotations

from random import Random

import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from diptych_kv_transfer.tables.actions import Action, Fence, LeaseEnded, Send, SendBlocks
from diptych_kv_transfer.tables.early_opens import MAX_EARLY, MAX_EARLY_RUNS
from diptych_kv_transfer.tables.lease import LIVE, TRANSITIONS, Claim, LeaseState
from diptych_kv_transfer.tables.leases import MAX_REMEMBERED, LeaseTable
from diptych_kv_transfer.tables.load import coalesce
from diptych_kv_transfer.tables.messages import (
    Close,
    Closed,
    FromReader,
    Open,
    Opened,
    Refused,
    Reject,
    Renew,
    Sending,
)

LEASE_SECONDS = 30.0
D, STRANGER = 1, 2
TAG = 7
BLOCKS = [4, 5, 6, 9]


def promised() -> LeaseTable:
    table = LeaseTable(LEASE_SECONDS)
    assert table.promise("lease", "request", len(BLOCKS), "digest", 0.0) == []
    return table


def granted() -> LeaseTable:
    table = promised()
    assert table.grant("lease", BLOCKS, 0.0) == []
    return table


def opening(
    runs: list[tuple[int, int]] | None = None,
    digest: str = "digest",
    tag: int = TAG,
    early: bool = False,
) -> Open:
    return Open("lease", digest, tag, [(0, 4)] if runs is None else runs, early)


def closing(ok: bool = True, tag: int = TAG) -> Close:
    return Close("lease", ok, tag)


def closed(held: bool, tag: int = TAG) -> Closed:
    return Closed("lease", held, tag)


def reading() -> LeaseTable:
    table = granted()
    table.receive(D, opening(), 0.0)
    return table


def ended(outcome: str) -> LeaseEnded:
    return LeaseEnded("request", BLOCKS, outcome, "lease")


def state(table: LeaseTable) -> LeaseState:
    return table.leases["lease"].state


def test_an_open_claims_the_lease_and_sends_its_runs() -> None:
    table = granted()
    assert table.receive(D, opening(), 0.0) == [
        Send(D, Opened("lease", TAG)),
        Send(D, Sending("lease", TAG, TAG, [(0, 3), (3, 1)])),
        SendBlocks(D, "lease", TAG, [range(4, 7), range(9, 10)]),
    ]
    assert state(table) is LeaseState.READING


def test_an_open_of_nothing_sends_nothing() -> None:
    table = granted()
    assert table.receive(D, opening([]), 0.0) == [Send(D, Opened("lease", TAG))]
    assert table.receive(D, closing(), 0.0) == [Send(D, closed(True)), ended("released")]


def test_a_repeated_open_is_answered_but_not_sent_again() -> None:
    table = reading()
    assert table.receive(D, opening(), 1.0) == [Send(D, Opened("lease", TAG))]


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (D, Open("nobody's", "digest", 7, [])),
        (D, opening(digest="of another prompt")),
        (D, opening([(3, 2)])),
        (D, opening([(99, 1)])),
        (D, opening([(0, 2**40)])),
    ],
    ids=["unknown", "other prompt", "past the end", "beyond the end", "huge"],
)
def test_a_forged_open_is_refused_and_changes_nothing(peer: int, message: Open) -> None:
    table = granted()
    [answer] = table.receive(peer, message, 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)
    assert state(table) is LeaseState.GRANTED
    assert table.totals.stale_reads_refused == 1


@pytest.mark.parametrize("peer", [D, STRANGER])
def test_a_second_and_different_open_is_refused(peer: int) -> None:
    table = reading()
    [answer] = table.receive(peer, opening([(0, 1)]), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)


def test_only_the_claimer_may_close() -> None:
    table = reading()
    assert table.receive(STRANGER, closing(), 0.0) == [Send(STRANGER, closed(False))]
    assert state(table) is LeaseState.READING


def test_close_is_answered_at_once_but_blocks_wait_for_the_sends() -> None:
    table = reading()
    assert table.receive(D, closing(), 0.0) == [Send(D, closed(True))]
    assert table.sends_ended("lease", TAG) == [ended("released")]
    assert table.leases == {}


def test_a_repeated_close_gets_the_same_answer_and_nobody_else_does() -> None:
    table = reading()
    table.sends_ended("lease", TAG)
    table.receive(D, closing(), 0.0)
    assert table.receive(D, closing(), 1.0) == [Send(D, closed(True))]
    assert table.receive(D, closing(tag=8), 1.0) == [Send(D, closed(False, tag=8))]
    assert table.receive(STRANGER, closing(), 1.0) == [Send(STRANGER, closed(False))]


def test_an_ended_lease_cannot_be_opened() -> None:
    table = reading()
    table.sends_ended("lease", TAG)
    table.receive(D, closing(), 0.0)
    [answer] = table.receive(D, opening(early=True), 1.0)
    assert answer == Send(D, Refused("lease", "the lease has released", TAG))
    assert table.totals.stale_reads_refused == 1


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
        assert actions == [Send(D, closed(False))], "the reader is told at once"
        actions = table.sends_ended("lease", TAG)
    assert actions == [ended("expired" if how == "expiry" else "revoked")]
    assert table.receive(D, closing(), LEASE_SECONDS) == [Send(D, closed(False))]


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
    assert table.next_deadline() == 2 * LEASE_SECONDS, "nothing else may ever happen"
    assert table.tick(table.next_deadline()) == [Fence(D)]
    assert table.tick(1e9) == []
    assert table.peer_lost(D) == [ended("expired")]


# --- while the prompt is still computed ----------------------------------------------------------


def test_finished_blocks_travel_while_others_are_computed() -> None:
    table = promised()
    assert table.receive(D, opening(), 0.0) == [Send(D, Opened("lease", TAG))]
    assert table.lend("lease", BLOCKS[:2]) == [
        Send(D, Sending("lease", TAG, TAG, [(0, 2)])),
        SendBlocks(D, "lease", TAG, [range(4, 6)]),
    ]
    assert table.lend("lease", BLOCKS[:2]) == []
    assert table.grant("lease", BLOCKS, 1.0) == [
        Send(D, Sending("lease", TAG, TAG + 1, [(2, 1), (3, 1)])),
        SendBlocks(D, "lease", TAG + 1, [range(6, 7), range(9, 10)]),
    ]
    assert state(table) is LeaseState.READING
    table.sends_ended("lease", TAG)
    table.sends_ended("lease", TAG + 1)
    assert table.receive(D, closing(), 2.0) == [Send(D, closed(True)), ended("released")]


def test_a_promise_does_not_expire() -> None:
    table = promised()
    table.receive(D, Renew(["lease"]), 1.0)
    assert table.next_deadline() == float("inf")
    assert table.tick(1e9) == []
    table.grant("lease", BLOCKS, 1e9)
    assert table.next_deadline() == 1e9 + LEASE_SECONDS


def test_a_read_of_a_promise_is_not_confirmed_and_the_promise_goes_on() -> None:
    table = promised()
    table.receive(D, opening([(0, 1)]), 0.0)
    table.lend("lease", BLOCKS[:1])
    assert table.receive(D, closing(), 0.0) == [Send(D, closed(False))]
    assert state(table) is LeaseState.PROMISED
    assert table.receive(STRANGER, opening([]), 0.0) == [Send(STRANGER, Opened("lease", TAG))]


def test_a_close_before_everything_was_sent_is_not_confirmed() -> None:
    table = promised()
    table.receive(D, opening(), 0.0)
    table.lend("lease", BLOCKS[:1])
    table.leases["lease"].become(LeaseState.GRANTED)
    table.leases["lease"].become(LeaseState.READING)
    assert table.receive(D, closing(), 0.0) == [Send(D, closed(False))]


@pytest.mark.parametrize("how", ["reject", "revoke"])
def test_a_promise_that_is_not_kept_is_withdrawn_and_its_reader_told(how: str) -> None:
    table = promised()
    table.receive(D, opening(), 0.0)
    table.lend("lease", BLOCKS[:1])
    actions = table.receive(D, Reject("lease"), 0.0) if how == "reject" else table.revoke("lease")
    assert actions == [Send(D, closed(False))]
    assert table.grant("lease", BLOCKS, 1.0) == [], "too late"
    gone = LeaseEnded("request", BLOCKS[:1], "withdrawn", "lease")
    assert table.sends_ended("lease", TAG) == [gone]
    assert table.totals.leases_rejected == (how == "reject")


def test_who_has_a_copy_of_a_reference_does_not_end_it_under_its_reader() -> None:
    table = reading()
    assert table.receive(STRANGER, Reject("lease"), 0.0) == []
    assert state(table) is LeaseState.READING
    assert table.totals.leases_rejected == 0
    table.receive(D, closing(ok=False), 0.0)
    table.receive(STRANGER, Reject("lease"), 0.0)
    assert state(table) is LeaseState.REVOKED, "nobody reads it any more"


def test_an_early_open_waits_for_the_promise() -> None:
    table = LeaseTable(LEASE_SECONDS)
    assert table.receive(D, opening(early=True), 0.0) == []
    opened = table.promise("lease", "request", len(BLOCKS), "digest", 1.0)
    assert opened == [Send(D, Opened("lease", TAG))]
    assert table.receive(D, opening(), 1.0) == opened, "the same claim, whether early or not"


@pytest.mark.parametrize("how", ["peer lost", "let go", "asked again"])
def test_an_early_open_is_forgotten_with_its_reader(how: str) -> None:
    table = LeaseTable(LEASE_SECONDS)
    table.receive(D, opening(early=True), 0.0)
    if how == "peer lost":
        table.peer_lost(D)
    elif how == "let go":
        assert table.receive(D, closing(ok=False), 0.0) == [Send(D, closed(False))]
    else:
        [answer] = table.receive(D, opening(), 0.0)
        assert answer == Send(D, Refused("lease", "unknown lease", TAG))
    assert table.promise("lease", "request", len(BLOCKS), "digest", 1.0) == []


def test_an_early_open_whose_reader_is_not_heard_of_is_forgotten() -> None:
    table = LeaseTable(LEASE_SECONDS)
    table.receive(D, opening(early=True), 0.0)
    assert table.next_deadline() == LEASE_SECONDS
    table.receive(D, Renew(["lease"]), 20.0)
    table.tick(LEASE_SECONDS)
    assert len(table._early) == 1
    table.tick(20.0 + LEASE_SECONDS)
    assert len(table._early) == 0
    assert table.next_deadline() == float("inf")
    assert table.promise("lease", "request", 4, "digest", 60.0) == [], "nobody reads it"


def test_early_opens_are_bounded() -> None:
    table = LeaseTable(LEASE_SECONDS)
    for number in range(MAX_EARLY + 10):
        table.receive(D, Open(f"{number}", "digest", 7, [], early=True), 0.0)
    assert len(table._early) == MAX_EARLY
    scattered = [(2 * index, 1) for index in range(MAX_EARLY_RUNS + 1)]
    [answer] = table.receive(D, opening(scattered, early=True), 0.0)
    assert answer == Send(D, Refused("lease", "unknown lease", TAG))


def test_whoever_lets_go_leaves_the_lease_to_others() -> None:
    table = reading()
    assert table.receive(D, closing(ok=False), 1.0) == [Send(D, closed(False))]
    assert state(table) is LeaseState.GRANTED
    assert Send(STRANGER, Opened("lease", 9)) in table.receive(STRANGER, opening(tag=9), 1.0)
    assert table.tick(LEASE_SECONDS + 1.0) == [Send(STRANGER, closed(False, tag=9))]


def test_a_message_about_an_earlier_claim_does_not_touch_the_next() -> None:
    table = reading()
    table.receive(D, closing(ok=False), 1.0)
    table.receive(D, opening(tag=9), 1.0)
    assert table.receive(D, closing(ok=False), 1.0) == [Send(D, closed(False))]
    assert state(table) is LeaseState.READING


def test_losing_the_reader_of_a_promise_keeps_the_promise() -> None:
    table = promised()
    table.receive(D, opening(), 0.0)
    table.lend("lease", BLOCKS[:2])
    assert table.peer_lost(D) == []
    assert table.receive(STRANGER, opening(tag=9), 0.0) == [
        Send(STRANGER, Opened("lease", 9)),
        Send(STRANGER, Sending("lease", 9, 9, [(0, 2)])),
        SendBlocks(STRANGER, "lease", 9, [range(4, 6)]),
    ]


@given(
    st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=20),
    st.lists(st.integers(0, 6), max_size=6),
    st.data(),
)
def test_however_blocks_become_ready_each_asked_for_is_sent_once(
    blocks: list[int], steps: list[int], data: st.DataObject
) -> None:
    asked = data.draw(st.lists(st.integers(0, len(blocks) - 1), unique=True).map(sorted))
    claim = Claim(D, Open("lease", "digest", TAG, [(index, 1) for index in asked]))
    if data.draw(st.booleans()):
        claim = Claim(D, Open("lease", "digest", TAG, coalesce({i: i for i in asked})))
    sent: list[tuple[int, int]] = []
    tags: list[int] = []
    ready = 0
    for step in (*steps, len(blocks)):
        ready = min(len(blocks), ready + step)
        batch = claim.take_ready(blocks[:ready])
        if batch is None:
            continue
        tags += range(batch.first, batch.first + len(batch.runs))
        for (first, count), where in zip(batch.runs, batch.blocks, strict=True):
            assert len(where) == count
            sent += zip(range(first, first + count), where, strict=True)
    assert sorted(sent) == [(index, blocks[index]) for index in asked]
    assert tags == list(range(TAG, TAG + len(tags)))


@each("start", LeaseState)
@each("to", LeaseState)
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
        table.promise(f"{number}", "request", 1, "digest", 0.0)
        table.revoke(f"{number}")
    assert len(table._ended) == MAX_REMEMBERED


LEASES = st.sampled_from(["a", "b", "c"])
PEERS = st.sampled_from([D, STRANGER])
TAGS = st.sampled_from([100, 200])


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Leases a, b, c of two blocks each under arbitrary messages, time and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(LEASE_SECONDS)
        self.now = 0.0
        self.sending: dict[tuple[str, int], int] = {}
        self.promised: list[str] = []
        self.ended: list[str] = []

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendBlocks(peer, lease_id, tag, _):
                    lease = self.table.leases[lease_id]
                    assert lease.state in LIVE, "sent after its end"
                    assert (lease_id, tag) not in self.sending, "sent twice under a tag"
                    self.sending[lease_id, tag] = peer
                case LeaseEnded(_, _, _, lease_id):
                    assert not any(name == lease_id for name, _ in self.sending), "still being sent"
                    self.ended.append(lease_id)
                case Send(_, Closed(lease_id, True)):
                    lease_state = self.table._ended[lease_id][0]
                    assert lease_state is LeaseState.RELEASED, "confirmed a read that was not held"

    def tell(self, peer: int, message: FromReader) -> None:
        self.do(self.table.receive(peer, message, self.now))

    @rule(lease=LEASES)
    def promise(self, lease: str) -> None:
        if lease not in self.table.leases:
            self.promised.append(lease)
        self.do(self.table.promise(lease, lease, 2, "digest", self.now))

    @rule(lease=LEASES, count=st.integers(0, 2))
    def lend(self, lease: str, count: int) -> None:
        before = self.table.leases.get(lease)
        if before is None or len(before.block_ids) <= count:
            self.do(self.table.lend(lease, [1, 2][:count]))

    @rule(lease=LEASES)
    def grant(self, lease: str) -> None:
        self.do(self.table.grant(lease, [1, 2], self.now))

    @rule(
        peer=PEERS,
        lease=LEASES,
        runs=st.sampled_from([[], [(0, 2)], [(1, 1)], [(0, 3)]]),
        tag=TAGS,
        early=st.booleans(),
    )
    def open(
        self, peer: int, lease: str, runs: list[tuple[int, int]], tag: int, early: bool
    ) -> None:
        # A reader draws its tags at random: none is used again, not even by another reader.
        tag += 1000 * peer
        if any(name == lease and used // 100 == tag // 100 for name, used in self.sending):
            return
        self.tell(peer, Open(lease, "digest", tag, runs, early))

    @rule(peer=PEERS, lease=LEASES, ok=st.booleans(), tag=TAGS)
    def close(self, peer: int, lease: str, ok: bool, tag: int) -> None:
        self.tell(peer, Close(lease, ok, tag + 1000 * peer))

    @rule(peer=PEERS, lease=LEASES)
    def renew(self, peer: int, lease: str) -> None:
        self.tell(peer, Renew([lease]))

    @rule(peer=PEERS, lease=LEASES)
    def reject(self, peer: int, lease: str) -> None:
        self.tell(peer, Reject(lease))

    @rule(lease=LEASES)
    def revoke(self, lease: str) -> None:
        self.do(self.table.revoke(lease))

    @rule(choice=st.randoms(use_true_random=False))
    def finish_sending(self, choice: Random) -> None:
        if self.sending:
            lease, tag = choice.choice(sorted(self.sending))
            del self.sending[lease, tag]
            self.do(self.table.sends_ended(lease, tag))

    @rule(peer=PEERS)
    def lose(self, peer: int) -> None:
        self.sending = {which: to for which, to in self.sending.items() if to != peer}
        self.do(self.table.peer_lost(peer))

    @rule(seconds=st.sampled_from([0.0, 10.0, 31.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.table.tick(self.now))

    @invariant()
    def every_lease_is_pinned_or_given_back(self) -> None:
        assert sorted([*self.table.leases, *self.ended]) == sorted(self.promised)

    @invariant()
    def the_accounts_close(self) -> None:
        of, here = self.table.counts, self.table.held
        assert of[LeaseState.PROMISED] == (
            of[LeaseState.GRANTED] + of[LeaseState.WITHDRAWN] + here[LeaseState.PROMISED]
        )
        assert of[LeaseState.GRANTED] == (
            of[LeaseState.RELEASED] + of[LeaseState.REVOKED] + of[LeaseState.EXPIRED]
            + here[LeaseState.GRANTED] + here[LeaseState.READING]
        )  # fmt: skip

    def teardown(self) -> None:
        for lease in "abc":
            self.grant(lease)
        for peer in (D, STRANGER):
            self.lose(peer)
        self.now += 10 * LEASE_SECONDS
        self.do(self.table.tick(self.now))
        assert sorted(self.ended) == sorted(self.promised), "blocks leaked"


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=150, stateful_step_count=40)
