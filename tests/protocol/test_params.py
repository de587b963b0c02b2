"""Parameters from outside are refused with the name of the field."""

from __future__ import annotations

from typing import Any

import pytest
from cases import each

from diptych_protocol import (
    EngineConfig,
    InvalidRequestError,
    KVTransferParams,
    SamplingParams,
    fingerprint,
)


@each(
    ("field", "value"),
    [
        ("n", 0), ("n", 1000), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1),
        ("top_k", -2), ("min_p", 1.5), ("presence_penalty", 3.0), ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0), ("seed", 2**63), ("max_tokens", 0), ("min_tokens", -1),
        ("min_tokens", 17), ("logprobs", 21), ("stop", [""]), ("stop", ["x"] * 17),
        ("stop_token_ids", [1] * 257), ("temperature", float("nan")),
    ],
)  # fmt: skip
def test_a_value_out_of_range_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value}).check()
    assert caught.value.param == field


def test_the_defaults_are_valid() -> None:
    SamplingParams().check()
    EngineConfig(model="m").check()


@each(
    ("field", "value"),
    [
        ("model", ""), ("device", "tpu"), ("dtype", "int3"), ("block_size", 12),
        ("num_blocks", 1), ("kv_cache_bytes", 5), ("max_num_batched_tokens", 1),
        ("max_num_seqs", 0), ("num_threads", 0), ("max_model_len", 1),
    ],
)  # fmt: skip
def test_a_bad_engine_configuration_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig(**{"model": "m", field: value}).check()
    assert caught.value.param == field


GOOD = KVTransferParams(
    do_remote_prefill=True,
    remote_engine_id="p",
    remote_block_ids=[[1, 2]],
    remote_host="127.0.0.1",
    remote_port=1,
    remote_num_tokens=20,
    lease_id="ab",
    epoch="e",
    compat="c",
    expires_at=1,
    tokens_digest="d",
    proof="00",
).to_dict()


def test_a_hand_off_survives_its_own_vocabulary() -> None:
    assert KVTransferParams.parse(GOOD).to_dict() == GOOD
    assert KVTransferParams.parse({**GOOD, "another_project_s": 1}).to_dict() == GOOD


@each(
    "change",
    [
        {"remote_host": None}, {"lease_id": None}, {"remote_port": "x"}, {"epoch": None},
        {"do_remote_decode": True}, {"remote_block_ids": [[1], [2]]}, {"remote_block_ids": [1]},
        {"remote_num_tokens": "many"}, {"compat": None}, {"proof": None}, {"expires_at": 1.5},
        {"do_remote_prefill": False}, {"tp_size": 1 << 70}, {"tp_size": 0},
        {"first_token_ids": [1 << 31]}, {"remote_block_size": 1 << 64},
    ],
)  # fmt: skip
def test_incomplete_or_contradictory_hand_offs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="kv_transfer_params"):
        KVTransferParams.parse({**GOOD, **change})


@each(
    "host",
    ["prefill-0", "localhost", "evil.example", "", "127.1", "0x7f000001", "1.2.3.4:5", " 1.2.3.4"],
)
def test_only_addresses_are_connected_to(host: str) -> None:
    """A name would be looked up by whoever is told it."""
    for parse in (KVTransferParams.parse, KVTransferParams.naming_lease):
        with pytest.raises(InvalidRequestError, match="remote_host"):
            parse({**GOOD, "remote_host": host})
    for literal in ("10.1.2.3", "fd00::1", "fe80::1%eth0"):
        assert KVTransferParams.parse({**GOOD, "remote_host": literal}).remote_host == literal


@pytest.mark.parametrize("raw", [None, 3, [], "x", {"do_remote_prefill": "yes"}])
def test_garbage_instead_of_params_is_refused(raw: Any) -> None:
    with pytest.raises(InvalidRequestError):
        KVTransferParams.parse(raw)


def test_a_fingerprint_depends_on_content_not_on_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


@pytest.mark.parametrize(
    ("field", "entries", "says"),
    [
        ("logit_bias", dict.fromkeys(range(7, 900), 101.0), "of token 7 must be between"),
        ("logit_bias", dict.fromkeys(range(2000), 1.0), "at most 1024 entries, not 2000"),
        ("stop", ["a", "x" * 100_000], r"stop\[1\] must have a length of 1 to"),
        ("bad_words", [""] * 9, r"bad_words\[0\] must have a length"),
        ("stop_token_ids", [*range(5000)], "stop_token_ids must have at most"),
    ],
)
def test_of_many_entries_the_first_wrong_one_is_named(field: str, entries: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as refusal:
        SamplingParams(**{field: entries}).check()
    assert refusal.value.param == field
    assert len(str(refusal.value)) < 100


def test_a_negative_least_is_told_both_of_its_bounds() -> None:
    with pytest.raises(InvalidRequestError, match="between 0 and max_tokens, not -1"):
        SamplingParams(min_tokens=-1).check()
