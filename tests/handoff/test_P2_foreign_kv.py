"""P2: no foreign KV, ever. References that are not good, sent to a real engine over UCX: each is an
error, and afterwards everybody who did nothing wrong gets the right answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_kit.core import tokens
from engine_kit.handoff import Engine, drive, engines, prompt_of, request, save_toy, signed
from waits import PATIENCE_S

from diptych_protocol import EngineCoreOutput, FinishReason

Json = dict[str, Any]
LENGTH = 34
VICTIM = prompt_of(3, LENGTH)
ATTACKER = [*prompt_of(4, LENGTH - 1), VICTIM[-1]]
"""As long, with the same end: who looked at no KV but the last would see no difference."""
LEASE_SECONDS = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def four(model: str) -> Iterator[list[Engine]]:
    with engines(model, alone={}, prefill={}, decode={}, other={}) as made:
        yield made


@pytest.fixture
def alone(four: list[Engine]) -> Engine:
    return four[0]


@pytest.fixture
def prefill(four: list[Engine]) -> Engine:
    return four[1]


@pytest.fixture
def decode(four: list[Engine]) -> Engine:
    return four[2]


@pytest.fixture
def other(four: list[Engine]) -> Engine:
    return four[3]


_names = iter(f"r{i}" for i in range(1 << 20))


def answer(engine: Engine, prompt: list[int], **fields: Any) -> list[int]:
    outputs = drive(
        engine, request(next(_names), prompt, **{"max_tokens": 8, "ignore_eos": True, **fields})
    )
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    return tokens(outputs)


def lend(prefill: Engine, prompt: list[int], **fields: Any) -> Json:
    """What P says when it has computed a prompt."""
    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    message = request(
        next(_names), prompt, max_tokens=1, ignore_eos=True, extra_args=asked, **fields
    )
    lent = drive(prefill, message)[-1].kv_transfer_params
    assert lent is not None
    return lent


def fetch(
    decode: Engine, prefill: Engine, prompt: list[int], lent: Json, **fields: Any
) -> list[EngineCoreOutput]:
    """What D makes of a reference."""
    args = {"kv_transfer_params": lent}
    message = request(
        next(_names), prompt, max_tokens=8, ignore_eos=True, extra_args=args, **fields
    )
    return drive(decode, message, prefill)


def at_rest(*engines: Engine) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not all(engine.at_rest for engine in engines):
        if time.monotonic() > deadline:
            return False
        for engine in engines:
            engine.turn()
    return True


def test_the_model_notices_every_token_that_is_cached(alone: Engine) -> None:
    """Else these tests would prove nothing."""
    whole = answer(alone, VICTIM, max_tokens=24)
    assert answer(alone, ATTACKER) != whole[:8]
    for position in range(LENGTH - 1):
        other = VICTIM.copy()
        other[position] = other[position] % 63 + 1
        assert answer(alone, other, max_tokens=24) != whole, position


def test_P2_a_good_reference_brings_the_right_answer(
    alone: Engine, prefill: Engine, decode: Engine
) -> None:
    made = fetch(decode, prefill, VICTIM, lend(prefill, VICTIM))
    assert tokens(made) == answer(alone, VICTIM)
    assert at_rest(prefill, decode)


def with_(**changes: Any) -> Callable[[Json], Json]:
    return lambda lent: {**lent, **changes}


def blocks(change: Callable[[list[int]], list[int]]) -> Callable[[Json], Json]:
    return lambda lent: {**lent, "remote_block_ids": [change(lent["remote_block_ids"][0])]}


FORGERIES: dict[str, tuple[list[int], Callable[[Json], Json], Json]] = {
    "victim's reference, attacker's prompt": (ATTACKER, with_(), {}),
    "victim's blocks, invented lease": (ATTACKER, with_(lease_id="f" * 32), {}),
    "victim's prompt, invented lease": (VICTIM, with_(lease_id="f" * 32), {}),
    "victim's blocks, invented request": (ATTACKER, with_(remote_request_id="another"), {}),
    "lease id of another shape": (VICTIM, with_(lease_id="../../x"), {}),
    "too few blocks": (VICTIM, blocks(lambda ids: ids[:-1]), {}),
    "too many blocks": (VICTIM, blocks(lambda ids: [*ids, 0]), {}),
    "fewer tokens": (
        VICTIM, lambda lent: {**blocks(lambda ids: ids[:-1])(lent), "remote_num_tokens": 32}, {},
    ),
    "more tokens": (VICTIM, with_(remote_num_tokens=LENGTH + 1), {}),
    "another epoch": (VICTIM, with_(epoch="before"), {}),
    "another engine": (VICTIM, with_(remote_engine_id="somebody"), {}),
    "another salt": (VICTIM, with_(), {"cache_salt": "pepper"}),
    "nobody listens there": (VICTIM, with_(remote_host="127.0.0.1", remote_port=1), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGERIES)
def test_P2_a_reference_that_is_not_good_is_an_error_and_poisons_nothing(
    alone: Engine, prefill: Engine, decode: Engine, case: str
) -> None:
    prompt, forge, fields = FORGERIES[case]
    decode.forget_prefixes()
    lent = lend(prefill, VICTIM)
    made = fetch(decode, prefill, prompt, forge(lent), **fields)
    assert made[-1].finish_reason is FinishReason.ERROR
    assert made[-1].error
    assert tokens(made) == []
    assert answer(decode, prompt, **fields) == answer(alone, prompt), "an innocent client"
    decode.core.call("reject_kv_transfer", ["forged", lent])
    assert at_rest(prefill, decode)


@pytest.mark.parametrize(
    "change",
    [lambda ids: [10**6 + i for i in ids], lambda ids: ids[::-1], lambda ids: [0] * len(ids)],
    ids=["out of range", "backwards", "all the same"],
)
def test_P2_block_ids_are_hints_and_prove_nothing(
    alone: Engine, prefill: Engine, decode: Engine, change: Callable[[list[int]], list[int]]
) -> None:
    """P sends the blocks of the lease, or none, whatever numbers it is told, and by whom."""
    decode.forget_prefixes()
    lent = lend(prefill, VICTIM)
    made = fetch(decode, prefill, VICTIM, signed(blocks(change)(lent)))
    if made[-1].finish_reason is FinishReason.ERROR:
        assert tokens(made) == []
    else:
        assert tokens(made) == answer(alone, VICTIM)
    assert answer(decode, VICTIM) == answer(alone, VICTIM)
    decode.core.call("reject_kv_transfer", ["forged", lent])
    assert at_rest(prefill, decode)


@pytest.mark.parametrize("prompt", [VICTIM, ATTACKER], ids=["the same prompt", "another prompt"])
@pytest.mark.parametrize("reused", [False, True], ids=["consumed", "stale: its blocks were reused"])
def test_P2_a_reference_serves_once(
    alone: Engine,
    prefill: Engine,
    decode: Engine,
    other: Engine,
    prompt: list[int],
    reused: bool,
) -> None:
    decode.forget_prefixes()
    prefill.forget_prefixes()
    lent = lend(prefill, VICTIM)
    assert tokens(fetch(decode, prefill, VICTIM, lent)) == answer(alone, VICTIM)
    assert at_rest(prefill, decode)
    other.forget_prefixes()
    if reused:
        prefill.forget_prefixes()
        for seed in range(20, 28):
            answer(prefill, prompt_of(seed, LENGTH))
    decode.forget_prefixes()
    refused = prefill.hinge.stale_reads_refused
    made = fetch(decode, prefill, prompt, lent)
    assert made[-1].finish_reason is FinishReason.ERROR
    assert tokens(made) == []
    wanted = "used here before" if prompt == VICTIM else "another prompt"
    assert wanted in (made[-1].error or "")
    assert prefill.hinge.stale_reads_refused == refused, "nobody asked it"
    made = fetch(other, prefill, VICTIM, lent)
    assert "released" in (made[-1].error or ""), "nor does it serve another engine"
    assert tokens(made) == []
    assert prefill.hinge.stale_reads_refused == refused + 1, "prefill counts it"
    assert answer(decode, prompt) == answer(alone, prompt), "an innocent client"
    assert at_rest(prefill, decode)


def test_P2_the_victim_still_gets_her_answer(
    alone: Engine, prefill: Engine, decode: Engine
) -> None:
    """Somebody else's try with her reference neither takes it from her nor changes a thing."""
    decode.forget_prefixes()
    lent = lend(prefill, VICTIM)
    assert fetch(decode, prefill, ATTACKER, lent)[-1].finish_reason is FinishReason.ERROR
    assert tokens(fetch(decode, prefill, VICTIM, lent)) == answer(alone, VICTIM)
    assert at_rest(prefill, decode)


def test_P2_a_lease_that_has_expired_is_refused(model: str, alone: Engine) -> None:
    with engines(model, prefill={"lease_seconds": LEASE_SECONDS}, decode={}) as (prefill, decode):
        lent = lend(prefill, VICTIM)
        assert at_rest(prefill), "it frees its blocks by itself"
        assert prefill.hinge.leases_expired == 1
        made = fetch(decode, prefill, VICTIM, lent)
        assert made[-1].finish_reason is FinishReason.ERROR
        assert "expired" in (made[-1].error or "")
        assert answer(decode, VICTIM) == answer(alone, VICTIM)
        assert at_rest(prefill, decode)


def test_P2_a_prefill_engine_that_was_replaced_is_not_taken_for_the_former(
    model: str, alone: Engine
) -> None:
    """Same name, same address, same blocks, and a lease under the same id: another incarnation."""
    with engines(model, decode={}) as [decode]:
        with engines(model, prefill={}) as [former]:
            lent = lend(former, VICTIM)
        with engines(model, prefill={}) as [successor]:
            connector = successor.core.connector
            assert connector is not None
            there = {"remote_host": connector.host, "remote_port": connector.port}
            made = fetch(
                decode, successor, VICTIM, signed(lend(successor, VICTIM), epoch=lent["epoch"])
            )
            assert "restarted or replaced" in (made[-1].error or "")
            made = fetch(decode, successor, VICTIM, signed(lent, **there))
            assert "restarted or replaced" in (made[-1].error or "")
            assert tokens(fetch(decode, successor, VICTIM, lend(successor, VICTIM))) == answer(
                alone, VICTIM
            )
            assert at_rest(successor, decode)
