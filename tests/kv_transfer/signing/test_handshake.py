"""Two sides that have the key understand each other, and nobody else gets a word in."""

from __future__ import annotations

import hashlib

import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_kv_transfer.signing.handshake import (
    ANSWER_BYTES,
    NONCE_BYTES,
    AuthenticationError,
    Handshake,
    Session,
)
from diptych_kv_transfer.signing.references import MAC_BYTES, PUBLIC_KEY, HingeKey
from diptych_protocol import CurveKeys

KEY = HingeKey.of(CurveKeys("P" * 40, "S" * 40))
OTHER_KEY = HingeKey.of(CurveKeys("P" * 40, "T" * 40))
Record = tuple[int, bytes]


def nonce(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8), digest_size=NONCE_BYTES).digest()


def pair(seed: int = 0) -> tuple[Handshake, Handshake]:
    """Who connects, and who is connected to."""
    return (
        Handshake(KEY, nonce(2 * seed), connects=True),
        Handshake(KEY, nonce(2 * seed + 1), connects=False),
    )


def sessions(seed: int = 0) -> tuple[Session, Session]:
    ours, theirs = pair(seed)
    assert theirs.receive(ours.receive(theirs.receive(ours.opening))) == b""
    assert ours.session is not None
    assert theirs.session is not None
    return ours.session, theirs.session


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.binary(max_size=64))))
def test_what_both_sides_say_is_understood(said: list[tuple[bool, int, bytes]]) -> None:
    ours, theirs = sessions()
    for there, kind, data in said:
        sender, receiver = (ours, theirs) if there else (theirs, ours)
        assert receiver.open(kind, sender.seal(kind, data)) == data


def test_who_is_connected_to_says_nothing_unasked() -> None:
    assert pair()[1].opening == b""


@given(st.binary(max_size=2 * ANSWER_BYTES))
def test_an_impostor_is_told_a_nonce_and_nothing_else(answer: bytes) -> None:
    """Whatever it answers: it has not seen the key, and the nonce is a fresh one."""
    ours, _ = pair()
    assert ours.opening == nonce(0)
    with pytest.raises(AuthenticationError):
        ours.receive(answer)
    assert ours.session is None


@given(st.binary(max_size=ANSWER_BYTES), st.binary(max_size=ANSWER_BYTES))
def test_a_stranger_gets_no_session(first: bytes, second: bytes) -> None:
    _, theirs = pair()
    try:
        answer = theirs.receive(first)
    except AuthenticationError:
        answer = theirs.receive(nonce(3))
    assert len(answer) == ANSWER_BYTES, "a nonce and a mac, which are noise to a stranger"
    with pytest.raises(AuthenticationError):
        theirs.receive(second)
    assert theirs.session is None


def test_another_service_s_engine_gets_no_session() -> None:
    ours, theirs = pair()
    foreign = Handshake(OTHER_KEY, nonce(9), connects=False)
    with pytest.raises(AuthenticationError, match="key of this service"):
        ours.receive(foreign.receive(ours.opening))
    foreign = Handshake(OTHER_KEY, nonce(9), connects=True)
    with pytest.raises(AuthenticationError, match="key of this service"):
        foreign.receive(theirs.receive(foreign.opening))
    with pytest.raises(AuthenticationError, match="key of this service"):
        theirs.receive(bytes(MAC_BYTES))


def test_a_side_cannot_be_answered_with_its_own_words() -> None:
    """A mac says which side made it: a mirror is nobody."""
    ours, theirs = pair()
    again = Handshake(KEY, nonce(5), connects=False)
    answer = again.receive(ours.opening)
    theirs.receive(ours.opening)
    with pytest.raises(AuthenticationError):
        theirs.receive(answer[NONCE_BYTES:])
    with pytest.raises(AuthenticationError):
        ours.receive(ours.opening + ours.receive(answer))


@each("damaged", range(2 * NONCE_BYTES + 2 * MAC_BYTES))
def test_a_handshake_that_somebody_edits_fails(damaged: int) -> None:
    """At each byte of it."""
    ours, theirs = pair()
    at = damaged - NONCE_BYTES
    answer = theirs.receive(flipped(ours.opening, damaged) if at < 0 else ours.opening)
    if at < ANSWER_BYTES:
        with pytest.raises(AuthenticationError):
            ours.receive(flipped(answer, at) if at >= 0 else answer)
        return
    with pytest.raises(AuthenticationError):
        theirs.receive(flipped(ours.receive(answer), at - ANSWER_BYTES))
    assert theirs.session is None


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_record_that_somebody_edits_is_found_out() -> None:
    """At each byte of it, content and mac."""
    record = sessions()[0].seal(0, b"Close(lease)")
    for at in range(len(record)):
        with pytest.raises(AuthenticationError):
            sessions()[1].open(0, flipped(record, at))
    for kept in range(len(record)):
        with pytest.raises(AuthenticationError):
            sessions()[1].open(0, record[:kept])
    with pytest.raises(AuthenticationError):
        sessions()[1].open(1, record)
    assert sessions()[1].open(0, record) == b"Close(lease)"


@given(st.permutations(range(4)), st.integers(1, 4))
def test_records_are_taken_in_their_order_and_once(order: list[int], taken: int) -> None:
    ours, theirs = sessions()
    records = [ours.seal(0, bytes([number])) for number in range(4)]
    for expected, number in enumerate(order[:taken]):
        if number == expected:
            assert theirs.open(0, records[number]) == bytes([number])
            continue
        with pytest.raises(AuthenticationError):
            theirs.open(0, records[number])
        return
    with pytest.raises(AuthenticationError):
        theirs.open(0, records[order[taken - 1]])


def test_a_record_is_not_sent_back_nor_to_another_connection() -> None:
    ours, theirs = sessions()
    record = ours.seal(0, b"Renew")
    with pytest.raises(AuthenticationError):
        ours.open(0, record)
    for seed in (1, 2):
        with pytest.raises(AuthenticationError):
            sessions(seed)[1].open(0, record)
    assert theirs.open(0, record) == b"Renew"


def test_a_recorded_session_is_worth_nothing() -> None:
    """The nonce of who hears it is another one, and so is every mac that follows."""
    ours, theirs = pair()
    opening = ours.opening
    proof = ours.receive(theirs.receive(opening))
    again = Handshake(KEY, nonce(7), connects=False)
    again.receive(opening)
    with pytest.raises(AuthenticationError):
        again.receive(proof)


def test_nobody_proves_itself_twice() -> None:
    ours, theirs = pair()
    answer = theirs.receive(ours.opening)
    theirs.receive(ours.receive(answer))
    for side in (ours, theirs):
        with pytest.raises(AuthenticationError, match="already"):
            side.receive(answer)


def test_a_key_depends_on_the_secret_alone_and_uses_are_apart() -> None:
    assert KEY.mac(b"a", b"x") == HingeKey.of(CurveKeys("Q" * 40, "S" * 40)).mac(b"a", b"x")
    made = {key.mac(label, b"x") for key in (KEY, OTHER_KEY, PUBLIC_KEY) for label in (b"a", b"b")}
    made |= {KEY.derive(label, b"x").mac(b"a", b"x") for label in (b"a", b"b")}
    assert len(made) == 8
