"""Bytes to messages: whole round trips, and nothing but RemoteProtocolError for the rest."""

from __future__ import annotations

import msgspec
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_kv_transfer.tables.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Close,
    Closed,
    Hello,
    Open,
    Opened,
    Refused,
    Reject,
    RemoteProtocolError,
    Renew,
    Sending,
    decode,
    encode,
)

LEASE = "0" * 32
MESSAGES: list[AnyMessage] = [
    Hello("prefill-0", "epoch", {"dtype": "float32", "block_size": 16}),
    Open(LEASE, "digest", (1 << 62) - 1, [(0, 3), (7, 1)]),
    Open(LEASE, "digest", 0, []),
    Open(LEASE, "digest", 0, [], early=True),
    Close(LEASE, True, 7),
    Renew([LEASE, "1" * 32]),
    Reject(LEASE),
    Opened(LEASE),
    Refused(LEASE, "unknown lease"),
    Sending(LEASE, 7, 9, [(0, 3)]),
    Closed(LEASE, False, 7),
]


@each("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@each(
    "raw",
    [
        ["Open", LEASE, "digest", 1 << 62, []],
        ["Open", LEASE, "digest", -1, []],
        ["Open", LEASE, "digest", 0, [[-1, 1]]],
        ["Open", LEASE, "digest", 0, [[0, 0]]],
        ["Open", "x" * 257, "digest", 0, []],
        ["Close", LEASE, "yes"],
        ["Hello", "x" * 257, "epoch", {}],
        ["Hello", "p", "epoch", {"dtype": 1.5}],
        ["Steal", LEASE],
        [],
        {"type": "Close"},
        None,
    ],
    ids=repr,
)
def test_a_value_out_of_bounds_is_refused(raw: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode(raw))


def test_a_huge_message_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RemoteProtocolError, match=str(MAX_MESSAGE_BYTES + 1)):
        decode(b"\x90" * (MAX_MESSAGE_BYTES + 1))


@given(st.binary(max_size=256))
def test_garbage_is_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        decode(data)
    except RemoteProtocolError:
        return


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(
    message: AnyMessage, data: st.DataObject
) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    except RemoteProtocolError:
        return


def test_deep_nesting_does_not_exhaust_the_stack() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"\x91" * 100_000)
