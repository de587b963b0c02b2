"""Leases of prefixes: what an owner lends that remembers a part, and what a reader makes of it."""

from __future__ import annotations

import pytest

from diptych_kv_transfer.memory.staging import Staging
from diptych_kv_transfer.tables.actions import (
    Action,
    Connect,
    Fence,
    LeaseEnded,
    LoadEnded,
    PrefixAsked,
    PrefixLate,
    ReceiveBlocks,
    Send,
    SendBlocks,
    Stage,
)
from diptych_kv_transfer.tables.lease import LeaseState
from diptych_kv_transfer.tables.leases import LeaseTable
from diptych_kv_transfer.tables.load import LeaseRef, LoadState, Prefix
from diptych_kv_transfer.tables.loads import ANSWER_SECONDS, READ_SECONDS, STOP_SECONDS, LoadTable
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
from diptych_kv_transfer.tables.prefix_asks import MAX_ASKS
from diptych_protocol import KVTransferStats

LEASE_SECONDS = 30.0
READER, STRANGER = 1, 2
TAG = 7
NAMES = [bytes([number]) * 16 for number in range(6)]
ASK = Open("lease", "", TAG, [(2, 4)], names=NAMES)
BLOCKS = [4, 5, 6, 9]
"""What the owner remembers: the first four."""
ASKED = PrefixAsked("lease", NAMES, 2)
LENT: list[Action] = [
    Send(READER, Opened("lease", TAG, 4)),
    Send(READER, Sending("lease", TAG, TAG, [(2, 1), (3, 1)])),
    SendBlocks(READER, "lease", TAG, [range(6, 7), range(9, 10)]),
]
WITHDRAWN = LeaseEnded("", BLOCKS, "withdrawn", "lease")


def asked() -> LeaseTable:
    table = LeaseTable(LEASE_SECONDS)
    assert table.receive(READER, ASK, 0.0) == [ASKED]
    return table


def lent() -> LeaseTable:
    table = asked()
    assert table.lend_prefix("lease", BLOCKS, NAMES[3], 0.0) == LENT
    return table


def refusal(actions: list[Action], peer: int = READER) -> str:
    [action] = actions
    assert isinstance(action, Send)
    assert action.peer == peer
    assert isinstance(action.message, Refused)
    return action.message.reason


# --- the owner ------------------------------------------------------------------------------------


def test_what_is_remembered_is_sent_as_far_as_it_is_lacked() -> None:
    table = lent()
    assert table.leases["lease"].state is LeaseState.READING
    assert (table.totals.prefixes_lent, table.totals.prefixes_refused) == (1, 0)
    table.sends_ended("lease", TAG)
    assert table.receive(READER, Close("lease", True, TAG), 1.0) == [
        Send(READER, Closed("lease", True, TAG)),
        LeaseEnded("", BLOCKS, "released", "lease"),
    ]


def test_a_prefix_of_which_nothing_is_remembered_is_refused_and_the_copy_of_the_question_too() -> (
    None
):
    table = asked()
    assert "nothing of the prefix" in refusal(table.lend_prefix("lease", [], b"", 0.0))
    assert "withdrawn" in refusal(table.receive(READER, ASK, 0.1))
    assert not table.leases
    assert (table.totals.prefixes_lent, table.totals.prefixes_refused) == (0, 1)


def test_repetitions_are_asked_and_lent_once() -> None:
    table = asked()
    assert table.receive(READER, ASK, 0.1) == []
    table.lend_prefix("lease", BLOCKS, NAMES[3], 0.2)
    assert table.receive(READER, ASK, 0.3) == [Send(READER, Opened("lease", TAG, 4))]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Open("x", "", TAG, [], names=NAMES), "no block"),
        (Open("x", "", TAG, [(5, 2)], names=NAMES), "behind the end"),
        (Open("x", "", TAG, [(0, 6), (1, 1)], names=NAMES), "more blocks"),
        (Open("lease", "", TAG, [(0, 1)], names=NAMES), "another reader"),
    ],
)
def test_senseless_questions_are_refused_unasked(message: Open, why: str) -> None:
    assert why in refusal(asked().receive(STRANGER, message, 0.0), STRANGER)


def test_only_so_many_questions_wait_for_the_engine() -> None:
    table = LeaseTable(LEASE_SECONDS)
    asks = [Open(f"{number}", "", TAG, [(0, 1)], names=NAMES) for number in range(MAX_ASKS + 1)]
    answers = []
    for ask in asks:
        answers.append(table.receive(STRANGER, ask, 0.0))
        table.receive(STRANGER, Reject(ask.lease_id), 0.0)  # the engine is told all the same
    assert all(isinstance(answer[0], PrefixAsked) for answer in answers[:-1])
    assert "too many" in refusal(answers[-1], STRANGER)
    table.lend_prefix("0", [], b"", 0.0)
    again = Open("again", "", TAG, [(0, 1)], names=NAMES)
    assert table.receive(STRANGER, again, 0.0) == [PrefixAsked("again", NAMES, 0)]


@pytest.mark.parametrize(
    "leave",
    [
        lambda table: table.receive(READER, Reject("lease"), 0.1),
        lambda table: table.receive(READER, Close("lease", False, TAG), 0.1),
        lambda table: table.peer_lost(READER),
    ],
    ids=["reject", "close", "lost"],
)
def test_a_reader_that_leaves_before_the_answer_pins_nothing(leave: object) -> None:
    table = asked()
    leave(table)  # type: ignore[operator]
    assert table.lend_prefix("lease", BLOCKS, NAMES[3], 0.2) == [WITHDRAWN]
    assert table.counts[LeaseState.PROMISED] == table.counts[LeaseState.WITHDRAWN] == 1
    assert table.totals.prefixes_lent == 0


def test_a_stranger_cannot_take_the_question_back() -> None:
    table = asked()
    table.receive(STRANGER, Reject("lease"), 0.1)
    table.receive(STRANGER, Close("lease", False, TAG), 0.1)
    assert table.lend_prefix("lease", BLOCKS, NAMES[3], 0.2) == LENT


def test_a_prefix_is_lent_for_one_lease_at_most_whatever_its_reader_says() -> None:
    table = lent()
    for second in range(int(LEASE_SECONDS)):
        table.receive(READER, Renew(["lease"]), float(second))
        assert table.tick(float(second)) == []
    assert table.tick(LEASE_SECONDS) == [Send(READER, Closed("lease", False, TAG))]
    assert table.sends_ended("lease", TAG) == [LeaseEnded("", BLOCKS, "expired", "lease")]


def test_a_reader_that_gives_up_ends_the_lease_because_nobody_else_knows_it() -> None:
    table = lent()
    table.sends_ended("lease", TAG)
    assert table.receive(READER, Close("lease", False, TAG), 1.0) == [
        Send(READER, Closed("lease", False, TAG)),
        LeaseEnded("", BLOCKS, "revoked", "lease"),
    ]


# --- the reader -----------------------------------------------------------------------------------

ME = Hello("taker", "t1", {"dtype": "float32"})
OWNER = Hello("holder", "h1", {"dtype": "float32"})
ADDRESS = ("10.0.0.1", 5000)
LEASE = LeaseRef("lease", ADDRESS, "holder", "h1")
PREFIX = Prefix(NAMES, name_tokens=16, block_tokens=16, first=2)
WANTED = {2: 10, 3: 11, 4: 12, 5: 13}
FETCH = Open("lease", "", TAG, [(2, 4)], names=NAMES)
PART = Sending("lease", TAG, TAG, [(2, 2)])
STOP: list[Action] = [
    Send(READER, Close("lease", False, TAG)),
    Send(READER, Reject("lease")),
]


def started(load_timeout_s: float = 60.0, hello: Hello = OWNER) -> LoadTable:
    table = LoadTable(ME, load_timeout_s)
    assert table.reach(ADDRESS) == [Connect(ADDRESS)]
    table.connected(ADDRESS, READER, 0.0)
    table.greeted(READER, hello, 0.0)
    start(table)
    return table


def start(table: LoadTable) -> list[Action]:
    return table.start("r", LEASE, "", TAG, dict(WANTED), 96, 0.0, prefix=PREFIX)


def only_end(actions: list[Action]) -> LoadEnded:
    [ended] = [action for action in actions if isinstance(action, LoadEnded)]
    return ended


def read_part(table: LoadTable, *messages: Opened | Sending) -> LoadEnded:
    """The owner lends four blocks, of which two are lacked."""
    for message in messages:
        table.receive(READER, message, 1.0)
    assert table.receives_ended("r", TAG, ok=True, now=2.0) == [
        Send(READER, Close("lease", True, TAG))
    ]
    return only_end(table.receive(READER, Closed("lease", True, TAG), 3.0))


@pytest.mark.parametrize(
    "messages",
    [(Opened("lease", TAG, 4), PART), (PART, Opened("lease", TAG, 4))],
    ids=["in order", "overtaken"],
)
def test_what_is_lent_of_a_prefix_is_all_that_is_waited_for(
    messages: tuple[Opened | Sending, ...],
) -> None:
    table = started()
    ended = read_part(table, *messages)
    assert ended == LoadEnded("r", True, "", num_blocks=2, seconds=3.0, num_tokens=64)
    assert table.totals == KVTransferStats(), "it is no hand-off"
    assert table.prefixes_started == 1


@pytest.mark.parametrize("num_blocks", [0, 2, 7], ids=["none", "none that is lacked", "too many"])
def test_an_owner_that_lends_what_was_not_asked_for_is_not_believed(num_blocks: int) -> None:
    table = started()
    assert table.receive(READER, Opened("lease", TAG, num_blocks), 1.0) == STOP
    ended = only_end(table.receive(READER, Closed("lease", False, TAG), 1.0))
    assert "broke the protocol" in ended.reason


def test_a_refused_prefix_ends_the_load_at_once() -> None:
    ended = only_end(started().receive(READER, Refused("lease", "nothing", TAG), 0.5))
    assert (ended.ok, ended.reason, ended.num_tokens) == (False, "nothing", 0)


def test_an_owner_with_blocks_of_another_size_than_was_said_is_asked_for_nothing() -> None:
    other = Hello("holder", "h1", {"dtype": "float32"}, geometry={"block_size": 32})
    table = LoadTable(Hello("taker", "t1", {"dtype": "float32"}, geometry={"block_size": 16}), 60.0)
    table.reach(ADDRESS)
    table.connected(ADDRESS, READER, 0.0)
    table.greeted(READER, other, 0.0)
    actions = start(table)
    assert not only_end(actions).ok
    assert not [x for x in actions if isinstance(x, Send)], "there is no lease to reject either"


def test_an_owner_that_does_not_answer_is_waited_for_a_moment_only() -> None:
    table = started()
    assert table.tick(ANSWER_SECONDS - 0.1) == []
    assert table.tick(ANSWER_SECONDS) == [PrefixLate("r"), *STOP]
    assert table.tick(ANSWER_SECONDS + STOP_SECONDS) == [Fence(READER)]
    assert not only_end(table.peer_lost(READER, 1.0)).ok


def test_an_owner_that_does_not_go_on_is_not_waited_for_either() -> None:
    table = started()
    table.receive(READER, Opened("lease", TAG, 4), 0.5)
    assert PrefixLate("r") not in table.tick(0.5 + READ_SECONDS - 0.1)
    assert PrefixLate("r") in table.tick(0.5 + READ_SECONDS)
    assert table.loads["r"].state is LoadState.STOPPING


def test_a_prefix_that_was_never_asked_for_is_given_up_without_a_word() -> None:
    """The owner has not said who it is: other loads may wait for that longer."""
    table = LoadTable(ME, 60.0)
    table.reach(ADDRESS)
    table.connected(ADDRESS, READER, 0.0)
    start(table)
    actions = table.tick(ANSWER_SECONDS)
    assert not only_end(actions).ok
    assert len(actions) == 1, "no connection is cut, and nothing is rejected"


def test_less_room_is_needed_when_less_comes() -> None:
    sizes: dict[str, int | str] = {"num_layers": 1, "kv_heads": 1, "head_dim": 4}
    sizes["dtype"] = "float32"
    here = Hello("taker", "t1", sizes, geometry={"block_size": 16, "tensor_parallel_size": 1})
    there = Hello("holder", "h1", sizes, geometry={"block_size": 32, "tensor_parallel_size": 1})
    table = LoadTable(here, 60.0)
    table.reach(ADDRESS)
    table.connected(ADDRESS, READER, 0.0)
    table.greeted(READER, there, 0.0)
    names = Prefix(NAMES[:3], name_tokens=32, block_tokens=16, first=1)
    wanted = {index: index + 10 for index in range(1, 6)}
    [stage, _] = table.start("r", LEASE, "", TAG, wanted, 96, 0.0, prefix=names)
    assert isinstance(stage, Stage)
    assert isinstance(stage.staging, Staging)
    assert (stage.staging.start, stage.staging.end, stage.staging.num_blocks) == (16, 96, 3)
    [shorter] = table.receive(READER, Opened("lease", TAG, 2), 1.0)
    assert isinstance(shorter, Stage)
    assert isinstance(shorter.staging, Staging)
    assert (shorter.staging.start, shorter.staging.end) == (16, 64)
    assert shorter.staging.local_block_ids == [11, 12, 13]
    [receive] = table.receive(READER, Sending("lease", TAG, TAG, [(0, 2)]), 1.0)
    assert isinstance(receive, ReceiveBlocks)
