"""Leases that several readers share: each share goes its own way, and the blocks wait for all."""

from __future__ import annotations

from random import Random

import pytest
from cases import each

from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.tables.actions import LeaseEnded, Send, SendBlocks
from diptych_kv_transfer.tables.lease import LeaseState
from diptych_kv_transfer.tables.leases import LeaseTable
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
from diptych_kv_transfer.tables.shares import Share, share_named

LEASE_SECONDS = 30.0
FIRST, SECOND, STRANGER = 1, 2, 3
BLOCKS = [4, 5, 9]
ALL = [(0, 1), (1, 1), (2, 1)]
A, B = "lease/0/2/2", "lease/1/2/2"


def promised() -> LeaseTable:
    table = LeaseTable(LEASE_SECONDS)
    table.promise("lease", "request", len(BLOCKS), "digest", 0.0)
    return table


def granted() -> LeaseTable:
    table = promised()
    table.grant("lease", BLOCKS, 0.0)
    return table


def opening(name: str, tag: int = 7, *, early: bool = False) -> Open:
    return Open(name, "digest", tag, ALL, early)


def ended(outcome: str) -> LeaseEnded:
    return LeaseEnded("request", BLOCKS, outcome, "lease")


def read(table: LeaseTable, peer: int, name: str) -> list[object]:
    """A share is read to its end. Returns what follows its Close."""
    tag = 100 * peer
    assert Send(peer, Opened(name, tag)) in table.receive(peer, opening(name, tag), 0.0)
    table.sends_ended(name, tag)
    return list(table.receive(peer, Close(name, True, tag), 0.0))


@each(
    ("name", "share"),
    [
        ("lease/0/2/2", Share("lease", 0, 2, 2)),
        ("lease/3/4/1", Share("lease", 3, 4, 1)),
        ("lease", None),
        ("lease/0", None),
        ("lease/2/2/2", None),
        ("lease/0/4/3", None),
        ("lease/0/2/4", None),
        ("lease/0/2/0", None),
        ("lease/00/2/2", None),
        ("lease/0/65/65", None),
        ("lease/-1/2/2", None),
    ],
)
def test_a_name_stands_for_a_share_or_for_a_whole_lease(name: str, share: Share | None) -> None:
    assert share_named(name) == share
    assert share is None or share.name == name


@pytest.mark.parametrize(
    ("readers", "slices", "parts"),
    [
        (2, 2, [Part(0, 2), Part(1, 2)]),
        (2, 1, [WHOLE, WHOLE]),
        (4, 2, [Part(0, 2), Part(0, 2), Part(1, 2), Part(1, 2)]),
    ],
)
def test_each_reader_gets_its_slice(readers: int, slices: int, parts: list[Part]) -> None:
    assert [share.part for share in Share("lease", 0, readers, slices).all] == parts


def test_each_reader_is_sent_its_part_of_each_block() -> None:
    table = granted()
    for peer, name, part in [(FIRST, A, Part(0, 2)), (SECOND, B, Part(1, 2))]:
        assert table.receive(peer, opening(name), 0.0) == [
            Send(peer, Opened(name, 7)),
            Send(peer, Sending(name, 7, 7, ALL)),
            SendBlocks(peer, name, 7, [range(4, 5), range(5, 6), range(9, 10)], part),
        ]
    assert table.held[LeaseState.READING] == 2
    assert table.blocks_held == 3


def test_the_blocks_are_given_back_when_all_shares_have_been_read() -> None:
    table = granted()
    assert read(table, FIRST, A) == [Send(FIRST, Closed(A, True, 100))]
    assert table.receive(FIRST, Close(A, True, 100), 9.0) == [Send(FIRST, Closed(A, True, 100))]
    assert read(table, SECOND, B) == [Send(SECOND, Closed(B, True, 200)), ended("released")]
    assert table.leases == {}
    counts = (LeaseState.PROMISED, LeaseState.GRANTED, LeaseState.RELEASED)
    assert [table.counts[state] for state in counts] == [2, 2, 2]
    assert table.promise("lease", "request", 3, "digest", 0.0) == []
    assert read(table, FIRST, A) == [Send(FIRST, Closed(A, False, 100))], "it is not granted yet"


def test_readers_that_are_faster_than_the_grant_wait_for_it() -> None:
    table = promised()
    for peer, name in [(FIRST, A), (SECOND, B)]:
        assert table.receive(peer, opening(name), 0.0) == [Send(peer, Opened(name, 7))]
    sends = [action for action in table.grant("lease", BLOCKS, 0.0) if isinstance(action, Send)]
    assert sends == [
        Send(FIRST, Sending(A, 7, 7, ALL)),
        Send(SECOND, Sending(B, 7, 7, ALL)),
    ]


def test_readers_that_are_faster_than_the_promise_are_remembered_each() -> None:
    table = LeaseTable(LEASE_SECONDS)
    for peer, name in [(FIRST, A), (SECOND, B)]:
        assert table.receive(peer, opening(name, early=True), 0.0) == []
    assert table.promise("lease", "request", 3, "digest", 0.0) == [
        Send(FIRST, Opened(A, 7)),
        Send(SECOND, Opened(B, 7)),
    ]


def test_blocks_are_sent_to_every_reader_as_they_are_computed() -> None:
    table = promised()
    table.receive(FIRST, opening(A), 0.0)
    table.receive(SECOND, opening(B), 0.0)
    sends = [x for x in table.lend("lease", BLOCKS[:1]) if isinstance(x, SendBlocks)]
    assert [(x.peer, x.runs, x.part) for x in sends] == [
        (FIRST, [range(4, 5)], Part(0, 2)),
        (SECOND, [range(4, 5)], Part(1, 2)),
    ]


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (Reject(B), "revoked"),
        (Reject("lease"), "revoked"),
    ],
    ids=["its reader", "all of it"],
)
def test_a_share_that_nobody_wants_ends_without_the_others(
    message: FromReader, outcome: str
) -> None:
    table = granted()
    table.receive(FIRST, opening(A, 100), 0.0)
    assert table.receive(SECOND, message, 0.0) == []
    assert table.totals.leases_rejected == 1
    table.sends_ended(A, 100)
    assert table.receive(FIRST, Close(A, True, 100), 0.0) == [
        Send(FIRST, Closed(A, True, 100)),
        ended(outcome),
    ]


def test_an_engine_ends_all_shares_at_once() -> None:
    table = granted()
    table.receive(FIRST, Renew([A]), 0.0)
    assert table.revoke("lease") == [ended("revoked")]
    assert table.leases == {}
    early = promised()
    early.receive(FIRST, Renew([A]), 0.0)
    assert early.revoke("lease") == [LeaseEnded("request", [], "withdrawn", "lease")]
    assert early.grant("lease", BLOCKS, 0.0) == []


def test_each_reader_keeps_its_own_share_alive() -> None:
    table = granted()
    table.receive(FIRST, Renew([A]), 20.0)
    assert table.tick(31.0) == [], "the other share has expired, and has no reader to be told"
    assert table.held[LeaseState.GRANTED] == 1
    assert table.tick(51.0) == [ended("expired")]
    whole = granted()
    whole.receive(FIRST, Renew([A]), 0.0)
    whole.receive(FIRST, Renew(["lease"]), 20.0)
    assert whole.held[LeaseState.GRANTED] == 2
    whole.tick(31.0)
    assert whole.held[LeaseState.GRANTED] == 2


def test_a_lost_reader_ends_its_share_only() -> None:
    table = granted()
    table.receive(FIRST, opening(A), 0.0)
    assert table.peer_lost(FIRST) == []
    assert read(table, SECOND, B) == [Send(SECOND, Closed(B, True, 200)), ended("revoked")]


@pytest.mark.parametrize("name", ["lease", "lease/0/4/4", "lease/0/2/1"])
def test_what_is_divided_is_not_divided_otherwise(name: str) -> None:
    table = granted()
    table.receive(FIRST, opening(A), 0.0)
    [answer] = table.receive(STRANGER, opening(name), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)


def test_what_is_read_whole_is_not_divided() -> None:
    table = granted()
    table.receive(FIRST, opening("lease"), 0.0)
    [answer] = table.receive(STRANGER, opening(A), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)
    assert table.receive(STRANGER, Reject(A), 0.0) == []
    table.sends_ended("lease", 7)
    assert table.receive(FIRST, Close("lease", True, 7), 0.0)[-1] == ended("released")


@each("seed", range(40))
def test_in_any_order_of_messages_a_lease_ends_once_when_nobody_reads_it(seed: int) -> None:
    random = Random(seed)
    table, now = LeaseTable(LEASE_SECONDS), 0.0
    names = [share.name for share in Share("lease", 0, 4, 2).all]
    ends: list[LeaseEnded] = []
    sending: set[tuple[str, int]] = set()
    table.promise("lease", "request", 3, "digest", now)
    for step in range(200):
        now += random.choice([0.0, 1.0, 12.0])
        name, peer = random.choice([*names, "lease"]), random.randrange(4)
        actions = list(table.tick(now))
        match random.randrange(9):
            case 0 if step > 20:
                actions += table.grant("lease", BLOCKS, now)
            case 1:
                actions += table.receive(peer, opening(name, 100 * peer), now)
            case 2:
                actions += table.receive(peer, Close(name, True, 100 * peer), now)
            case 3:
                actions += table.receive(peer, Renew([name]), now)
            case 4 if step > 100:
                actions += table.receive(peer, Reject(name), now)
            case 5 if sending:
                done = sending.pop()
                actions += table.sends_ended(*done)
            case _:
                pass
        for action in actions:
            if isinstance(action, SendBlocks):
                assert not ends
                sending.add((action.lease_id, action.tag))
            elif isinstance(action, LeaseEnded):
                ends.append(action)
                assert not sending, "given back while a block is sent"
    for done in sending:
        ends += [x for x in table.sends_ended(*done) if isinstance(x, LeaseEnded)]
    ends += [x for x in table.revoke_all() if isinstance(x, LeaseEnded)]
    assert [(end.lease_id, end.request_id) for end in ends] == [("lease", "request")]
    ways = (LeaseState.RELEASED, LeaseState.REVOKED, LeaseState.EXPIRED, LeaseState.WITHDRAWN)
    assert table.counts[LeaseState.PROMISED] == sum(table.counts[way] for way in ways)
