"""Blocks that are lent while their prompts are computed, and requests that come for them before P
has answered."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_scheduler import (
    BLOCK,
    HERE,
    LEASE_SECONDS,
    ONE_GROUP,
    PREFILL,
    THERE,
    WINDOWS,
    VllmScheduler,
    announcement,
    prompt,
    reference,
)

from diptych_kv_transfer.parameters import describe_engine
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.load import LeaseRef
from diptych_kv_transfer.tables.messages import Hello, Reject
from diptych_protocol import KVTransferParams
from diptych_vllm.kv_groups import VllmKVGroups
from diptych_vllm.lending import Progress
from diptych_vllm.orders import Cancel, Fail, Fetch, Grant, Lend, Promise, Release, Withdraw
from diptych_vllm.scheduler_half import SchedulerHalf

LEASE_ID = "a" * 32
FOR_OTHERS = {"do_remote_decode": True, "lease_id": LEASE_ID}
BLOCKS = [5, 7, 6]
"""Where the nine tokens of a prompt are."""
LEASE = LeaseRef(f"{1:032x}", THERE, PREFILL.engine_id, PREFILL.epoch, LEASE_SECONDS)


def make_half(groups: VllmKVGroups = ONE_GROUP, **options: Any) -> SchedulerHalf:
    half = SchedulerHalf(
        References(PUBLIC_KEY, lambda: 0.0),
        groups,
        LEASE_SECONDS,
        random_bits=lambda _: 7,
        **options,
    )
    half.meet(describe_engine(Hello("here", "e1", {"model": "m"}), *HERE, LEASE_SECONDS))
    return half


def computes(half: SchedulerHalf, num_tokens: int, *, lost: bool = False) -> list[Any]:
    """The orders of a step that brings the prompt so far, before which it may have lost its
    blocks."""
    blocks = BLOCKS[: -(-num_tokens // BLOCK)]
    half.step({"r": Progress(num_tokens, [blocks])} if num_tokens else {}, {"r"} if lost else set())
    return half.take_orders()


@pytest.mark.parametrize(
    ("steps", "lent"),
    [
        ([4, 8, 9, 9], [0, 1, 2, 0]),
        ([3, 6, 9], [0, 0, 1]),
        ([8, 0, 0], [0, 2, 0]),
        ([9, 0], [0, 2]),
    ],
    ids=["whole blocks", "parts of blocks", "a step without it", "at once"],
)
def test_a_block_is_lent_with_the_step_after_the_one_that_has_completed_it(
    steps: list[int], lent: list[int]
) -> None:
    half = make_half()
    half.arrived(prompt("r", 9, FOR_OTHERS))
    half.take_orders()
    for num_tokens, num_blocks in zip(steps, lent, strict=True):
        expected = [Lend(LEASE_ID, BLOCKS[:num_blocks])] if num_blocks else []
        assert computes(half, num_tokens) == expected


def test_the_last_block_comes_with_the_grant_so_that_its_reader_is_confirmed() -> None:
    half = make_half()
    half.arrived(prompt("r", 8, FOR_OTHERS))
    half.take_orders()
    computes(half, 8)
    assert computes(half, 8) == [Lend(LEASE_ID, BLOCKS[:1])]
    half.finished("r", [BLOCKS[:2]], by_length=True)
    assert half.take_orders() == [Grant(LEASE_ID, "r", BLOCKS[:2])]


def test_a_request_that_loses_lent_blocks_loses_its_lease_and_gets_another_one() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, FOR_OTHERS))
    half.take_orders()
    computes(half, 4)
    computes(half, 8)
    another = f"{7:032x}"
    digest = prompt("r").digest
    assert computes(half, 4, lost=True) == [
        Withdraw(LEASE_ID), Promise(another, "r", 3, digest),
    ]  # fmt: skip
    assert computes(half, 9) == [Lend(another, BLOCKS[:1])]
    params = half.finished("r", [BLOCKS], by_length=True)
    assert params is not None
    assert params["lease_id"] == another
    assert half.take_orders() == [Grant(another, "r", BLOCKS)]


def test_a_request_that_loses_blocks_which_are_not_lent_keeps_its_lease() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, FOR_OTHERS))
    half.take_orders()
    computes(half, 8)
    assert computes(half, 4, lost=True) == []
    assert computes(half, 9) == [Lend(LEASE_ID, BLOCKS[:1])]


def test_of_several_groups_nothing_is_lent_before_the_grant() -> None:
    half = make_half(WINDOWS)
    half.arrived(prompt("r", 9, FOR_OTHERS))
    half.take_orders()
    blocks = [[5, 7, 6], [0, 8, 9], [0, 0, 1, 2, 3]]
    for _ in range(2):
        half.step({"r": Progress(9, blocks)}, set())
        assert half.take_orders() == []


def test_the_answer_says_from_which_length_on_it_helps_to_announce_and_the_proof_for_it() -> None:
    lends = make_half(announced_from=33)
    lends.arrived(prompt("r", 9, FOR_OTHERS))
    params = lends.finished("r", [BLOCKS], by_length=True)
    assert params is not None
    assert params["announcing"]["min_tokens"] == 33
    References(PUBLIC_KEY, lambda: 0.0).check_use(
        KVTransferParams.parse(params), prompt("r").digest
    )
    told = {"lease_id": "b" * 32, "proof": params["announcing"]["proof"], "expires_at": None}
    fetches = make_half()
    fetches.meet(describe_engine(PREFILL, *THERE, LEASE_SECONDS))
    fetches.arrived(prompt("s", 9, params | told))
    fetches.allocated("s", [BLOCKS], fetches.num_elsewhere("s", 0))
    [order] = fetches.take_orders()
    assert isinstance(order, Fetch)
    assert order.early
    without = make_half()
    without.arrived(prompt("r", 9, FOR_OTHERS))
    assert "announcing" not in (without.finished("r", [BLOCKS], by_length=True) or {})


def test_what_is_announced_is_fetched_under_the_digest_of_the_prompt_that_is_here() -> None:
    half = make_half()
    half.arrived(prompt("r", 11, announcement(1, tokens_digest="of another prompt")))
    assert half.take_orders() == [], "nothing is held that P may not have promised"
    half.allocated("r", [BLOCKS], half.num_elsewhere("r", 4))
    assert half.take_orders() == [
        Fetch("r/1", "r", LEASE, prompt("r", 9).digest, {1: 7, 2: 6}, 9, early=True)
    ]
    half.finished("r", [BLOCKS], by_length=False)
    assert half.take_orders() == [Cancel("r/1")]


@pytest.mark.parametrize(
    "params",
    [
        announcement(1, proof="0" * 32),
        announcement(1, remote_host="192.0.2.1"),
        announcement(1, epoch="another"),
        announcement(1, 10),
        announcement(1, remote_engine_id="here"),
    ],
    ids=["proof", "host", "epoch", "more tokens", "own engine"],
)
def test_what_no_engine_has_signed_or_does_not_fit_is_not_fetched(params: dict[str, Any]) -> None:
    half = make_half()
    half.arrived(prompt("r", 9, params))
    half.allocated("r", [BLOCKS], half.num_elsewhere("r", 0))
    assert half.take_orders() == [Fail("r")]


def test_a_lease_that_was_announced_in_vain_is_given_back_if_all_of_the_prompt_is_here() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, announcement(1)))
    half.allocated("r", [BLOCKS], 0)
    assert half.take_orders() == [Release(LEASE)]


# --- with a hinge ---------------------------------------------------------------------------------


def asks_early(vllm: VllmScheduler, name: str) -> None:
    """A request comes that was announced, and asks P for its blocks."""
    vllm.add(prompt(name, 9, announcement(1)))
    vllm.step()
    [driver] = vllm.drivers
    driver.connect(well=True)
    [(_, asked)] = driver.opens
    assert asked.early
    assert asked.lease_id == LEASE.lease_id


def test_a_request_that_was_announced_runs_when_p_has_confirmed_its_blocks() -> None:
    vllm = VllmScheduler()
    asks_early(vllm, "r")
    vllm.drivers[0].serve(held=True)
    vllm.update(vllm.collect())
    vllm.step()
    assert vllm.requests["r"].loaded
    assert vllm.drivers[0].hinge.loads.loads == {}


@pytest.mark.parametrize("how", ["refused", "not held", "too late", "aborted"])
def test_a_lease_outlives_a_fetch_of_it_that_was_announced_and_failed(how: str) -> None:
    vllm = VllmScheduler()
    asks_early(vllm, "r")
    [driver] = vllm.drivers
    match how:
        case "refused":
            driver.refuse()
        case "not held":
            driver.serve(held=False)
        case "too late":
            driver.pass_time(1000.0)
            driver.refuse()
        case "aborted":
            vllm.abort("r")
            vllm.step()
            driver.refuse()
    vllm.update(vllm.collect())
    vllm.step()
    assert not [message for _, message in driver.said if isinstance(message, Reject)]
    vllm.update(vllm.collect())
    assert vllm.ended["r"].loaded is False
    vllm.add(prompt("s", 9, reference(1)))
    vllm.step()
    assert [asked.lease_id for _, asked in driver.opens] == [LEASE.lease_id], "it is read later"
