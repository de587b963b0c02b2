"""Whoever waits for an answer to a message that cannot be decoded is found, if he is named."""

from __future__ import annotations

import msgspec
from engine_kit.wire import request
from hypothesis import given
from hypothesis import strategies as st

from diptych_protocol import UtilityCall
from diptych_protocol.salvage import call_id_of, request_id_of


@given(st.text(max_size=300), st.integers(0, 10_000))
def test_the_id_of_a_request_is_found_in_what_is_left_of_it(request_id: str, cut: int) -> None:
    message = msgspec.msgpack.encode(request(request_id))
    begins = len(msgspec.msgpack.encode(request_id)) + 3
    assert request_id_of(message[: begins + cut]) == request_id


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**64 - 1), st.booleans())
def test_the_id_of_a_call_is_found(client: int, call_id: int, many: bool) -> None:
    call = UtilityCall(client, call_id, "stats", [])
    assert call_id_of(msgspec.msgpack.encode(call)) == call_id
    long = [client, call_id, *([0] * 20 if many else [])]
    assert call_id_of(msgspec.msgpack.encode(long)) == call_id


@given(st.binary(max_size=40))
def test_no_bytes_raise_anything(data: bytes) -> None:
    for prefix in (b"", b"\x94", b"\xdc\x00\x10", b"\xdd", b"\x91\xdb", b"\x92\x00\xcf"):
        assert isinstance(request_id_of(prefix + data), (str, type(None)))
        assert isinstance(call_id_of(prefix + data), (int, type(None)))
