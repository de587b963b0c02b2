"""What P signed is believed, once and in time, and nothing else is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych_kv_transfer.signing.references import (
    ALL_FIELDS,
    LEASE_FIELDS,
    MAX_SKEW_S,
    MAX_TAKEN,
    PUBLIC_KEY,
    HingeKey,
    References,
    UnprovenReferenceError,
)
from diptych_protocol import CurveKeys, InvalidRequestError, KVTransferParams
from diptych_protocol.kv_transfer_params import ENGINE_FIELDS, EXPIRY

KEY = HingeKey.of(CurveKeys("P" * 40, "S" * 40))
ROTATED = HingeKey.of(CurveKeys("P" * 40, "T" * 40))
DIGEST = "0123456789abcdef" * 2
LENT = KVTransferParams(
    do_remote_prefill=True,
    remote_engine_id="p",
    remote_request_id="r",
    remote_block_ids=[[3, 4, 5]],
    remote_host="10.0.0.1",
    remote_port=5600,
    remote_num_tokens=40,
    lease_id="ab" * 16,
    lease_seconds=30.0,
    epoch="e",
    compat="c",
    first_token_ids=[7],
    remote_block_size=16,
    tokens_digest=DIGEST,
)
EDITS: dict[str, list[Any]] = {
    "do_remote_decode": [True],
    "do_remote_prefill": [False],
    "remote_engine_id": ["q", None],
    "remote_request_id": ["s", None],
    "remote_block_ids": [[[3, 4]], [[3, 4, 6]], [[3, 4], [5]], None],
    "remote_host": ["10.0.0.2", "::1", None],
    "remote_port": [5601, None],
    "remote_num_tokens": [39, 41, None],
    "tp_size": [2],
    "lease_id": ["ac" * 16, None],
    "lease_seconds": [3600.0, None],
    "epoch": ["f", None],
    "compat": ["d", None],
    "first_token_ids": [[8], [], [7, 7], None],
    "remote_block_size": [32, None],
    "expires_at": [1 << 40, 0, None],
    "tokens_digest": ["f" * 32, None],
    "proof": ["0" * 64, "", None, "é", "0" * 32, "00" * 4096],
}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lent(clock: Clock) -> KVTransferParams:
    return References(KEY, clock).sign(LENT, 30.0)


@pytest.fixture
def here(clock: Clock) -> References:
    return References(KEY, clock)


def carried(params: KVTransferParams) -> KVTransferParams:
    """As a proxy passes it on that writes JSON anew."""
    return KVTransferParams.parse(msgspec.json.decode(msgspec.json.encode(params.to_dict())))


def test_what_was_signed_is_believed(here: References, lent: KVTransferParams) -> None:
    assert lent.expires_at == 1030
    for params in (lent, carried(lent)):
        here.check_lease(params)
        here.check(params)
        here.check_use(params, DIGEST)


def test_every_field_is_edited_here() -> None:
    assert set(EDITS) == set(KVTransferParams.__struct_fields__)
    assert set(ENGINE_FIELDS) < set(LEASE_FIELDS) < set(ALL_FIELDS) == set(EDITS) - {"proof"}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in EDITS.items() for value in values],
    ids=lambda value: str(value)[:20],
)
def test_a_reference_that_was_edited_is_refused(
    here: References, lent: KVTransferParams, field: str, value: Any
) -> None:
    edited = msgspec.structs.replace(lent, **{field: value})
    with pytest.raises(UnprovenReferenceError) as caught:
        here.check_use(edited, DIGEST)
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.param == "kv_transfer_params"
    if field in (*LEASE_FIELDS, "proof"):
        with pytest.raises(UnprovenReferenceError):
            here.check_lease(msgspec.structs.replace(edited, proof=(edited.proof or "")[1:]))
    if field in LEASE_FIELDS:
        with pytest.raises(UnprovenReferenceError):
            here.check_lease(edited)


def test_a_lease_can_be_given_back_by_what_names_it(
    here: References, lent: KVTransferParams
) -> None:
    named = KVTransferParams.naming_lease({**lent.to_dict(), "remote_block_ids": "garbled"})
    here.check_lease(named)
    with pytest.raises(UnprovenReferenceError):
        here.check(named)


def test_signatures_of_parts_are_not_taken_for_each_other(
    here: References, lent: KVTransferParams
) -> None:
    proof, of_engine = lent.proof or "", here.proof_of_engine(LENT)
    here.check_engine(msgspec.structs.replace(LENT, proof=of_engine))
    for swapped in (of_engine, of_engine + proof[32:], proof[32:] + proof[:32], proof[:32]):
        with pytest.raises(UnprovenReferenceError):
            here.check(msgspec.structs.replace(lent, proof=swapped))
    for swapped in (proof, proof[:32], proof[32:]):
        with pytest.raises(UnprovenReferenceError):
            here.check_engine(msgspec.structs.replace(LENT, proof=swapped))


@pytest.mark.parametrize("field", ENGINE_FIELDS)
def test_an_announcement_speaks_of_the_engine_that_signed(here: References, field: str) -> None:
    announced = msgspec.structs.replace(LENT, proof=here.proof_of_engine(LENT))
    here.check_engine(msgspec.structs.replace(announced, remote_num_tokens=1, lease_id="cd" * 16))
    with pytest.raises(UnprovenReferenceError):
        here.check_engine(msgspec.structs.replace(announced, **{field: EDITS[field][0]}))


@pytest.mark.parametrize("key", [ROTATED, PUBLIC_KEY], ids=["rotated", "none"])
def test_engines_with_other_keys_are_not_believed(
    lent: KVTransferParams, clock: Clock, key: HingeKey
) -> None:
    """Another service's, or this one's before its keys were rotated: that is another revision."""
    other = References(key, clock)
    for check in (other.check_lease, other.check, other.check_engine):
        with pytest.raises(UnprovenReferenceError, match="no engine of this service"):
            check(lent)


def test_it_is_for_these_tokens(here: References, lent: KVTransferParams) -> None:
    with pytest.raises(UnprovenReferenceError, match="another prompt"):
        here.check_use(lent, "f" * 32)


def test_it_expires_on_its_own_clock_and_some_seconds_later_on_others(
    here: References, lent: KVTransferParams, clock: Clock
) -> None:
    clock.now = 1030.0 + MAX_SKEW_S
    here.check_use(lent, DIGEST)
    clock.now += 0.1
    with pytest.raises(UnprovenReferenceError, match="expired") as caught:
        here.check_use(lent, DIGEST)
    assert caught.value.param == EXPIRY
    here.check_lease(lent)  # a lease that was renewed meanwhile can still be given back


def test_it_serves_once(here: References, lent: KVTransferParams) -> None:
    assert not here.is_taken(lent)
    here.take(lent)
    assert here.is_taken(carried(lent))
    with pytest.raises(UnprovenReferenceError, match="used here before"):
        here.check_use(carried(lent), DIGEST)


def test_what_was_taken_is_forgotten_when_it_has_expired(here: References, clock: Clock) -> None:
    first = here.sign(LENT, 30.0)
    here.take(first)
    clock.now += 30.0 + MAX_SKEW_S + 1.0
    here.take(here.sign(LENT, 30.0))
    assert not here.is_taken(first)
    assert len(here._taken) == 1
    with pytest.raises(UnprovenReferenceError, match="expired"):
        here.check_use(first, DIGEST)


def test_what_is_remembered_is_bounded(here: References) -> None:
    for number in range(MAX_TAKEN + 10):
        here.take(msgspec.structs.replace(LENT, proof=str(number), expires_at=2000))
    assert len(here._taken) == MAX_TAKEN
