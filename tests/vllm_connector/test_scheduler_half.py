"""What the scheduler half orders and answers, for each thing that may come of a request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from vllm_scheduler import (
    HERE,
    LEASE_SECONDS,
    ONE_GROUP,
    PREFILL,
    THERE,
    WINDOWS,
    prompt,
    reference,
)

from diptych_kv_transfer.parameters import describe_engine
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.load import LeaseRef
from diptych_kv_transfer.tables.messages import Hello
from diptych_protocol import KVTransferParams
from diptych_vllm.kv_groups import VllmKVGroups
from diptych_vllm.orders import (
    Cancel,
    Fail,
    Fetch,
    Grant,
    Hold,
    Promise,
    Release,
    Revoke,
    RevokeAll,
    Withdraw,
)
from diptych_vllm.request import Arrival, identity_of
from diptych_vllm.scheduler_half import SchedulerHalf

LEASE_ID = "a" * 32
FOR_OTHERS = {"do_remote_decode": True, "lease_id": LEASE_ID}
BLOCKS = [[5, 7, 6]]
"""Where the nine tokens of a prompt are."""
BLOCKS_OF_WINDOWS = [[5, 7, 6], [0, 8, 9], [0, 0, 1, 2, 3]]
"""The same with `WINDOWS`."""


def make_half(groups: VllmKVGroups = ONE_GROUP, **options: Any) -> SchedulerHalf:
    half = SchedulerHalf(References(PUBLIC_KEY, lambda: 0.0), groups, LEASE_SECONDS, **options)
    half.meet(describe_engine(Hello("here", "e1", {"model": "m"}), *HERE, LEASE_SECONDS))
    return half


def lease_of(number: int) -> LeaseRef:
    return LeaseRef(f"{number:032x}", THERE, PREFILL.engine_id, PREFILL.epoch, LEASE_SECONDS)


# --- lending --------------------------------------------------------------------------------------


def test_a_lease_is_promised_before_anything_is_computed_and_granted_with_the_answer() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, FOR_OTHERS))
    [promise] = half.take_orders()
    assert promise == Promise(LEASE_ID, "r", 3, prompt("r").digest)

    answer = half.finished("r", [[*BLOCKS[0], 8]], by_length=True)
    assert half.take_orders() == [Grant(LEASE_ID, "r", BLOCKS[0])]
    params = KVTransferParams.parse(answer)
    References(PUBLIC_KEY, lambda: 0.0).check_use(params, prompt("r").digest)
    assert (params.lease_id, params.remote_num_tokens) == (LEASE_ID, 9)
    assert (params.remote_host, params.remote_port) == HERE
    assert half.awaited({"r"}, set()) == ({"r"}, set())
    assert len(half) == 0


@pytest.mark.parametrize(
    ("block_ids", "by_length"),
    [(BLOCKS, False), ([BLOCKS[0][:2]], True)],
    ids=["ended by itself", "its KV is gone"],
)
def test_what_cannot_go_on_elsewhere_is_not_lent(
    block_ids: list[list[int]], by_length: bool
) -> None:
    half = make_half()
    half.arrived(prompt("r", 9, FOR_OTHERS))
    half.take_orders()
    assert half.finished("r", block_ids, by_length=by_length) is None
    assert half.take_orders() == [Withdraw(LEASE_ID)]
    assert half.awaited({"r"}, set()) == (set(), set())


def test_two_requests_never_have_one_lease() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, FOR_OTHERS))
    half.finished("r", BLOCKS, by_length=True)
    half.arrived(prompt("s", 9, FOR_OTHERS))
    promises = [order for order in half.take_orders() if isinstance(order, Promise)]
    assert len({promise.lease_id for promise in promises}) == 2


def test_a_role_that_does_not_lend_or_fetch_does_neither() -> None:
    half = make_half(lends=False, fetches=False)
    half.arrived(prompt("r", 9, FOR_OTHERS))
    assert half.finished("r", BLOCKS, by_length=True) is None
    half.arrived(prompt("s", 9, reference(1)))
    half.allocated("s", BLOCKS, half.num_elsewhere("s", 0))
    assert half.take_orders() == [Fail("s")]


def test_a_lease_has_the_blocks_of_every_group_without_those_behind_its_window() -> None:
    half = make_half(WINDOWS)
    half.arrived(prompt("r", 9, FOR_OTHERS))
    [promise] = half.take_orders()
    assert promise == Promise(LEASE_ID, "r", 8, prompt("r").digest)
    half.finished("r", BLOCKS_OF_WINDOWS, by_length=True)
    assert half.take_orders() == [Grant(LEASE_ID, "r", [5, 7, 6, 8, 9, 1, 2, 3])]


def test_a_request_whose_windows_have_moved_on_is_not_lent() -> None:
    half = make_half(WINDOWS)
    half.arrived(prompt("r", 9, FOR_OTHERS))
    half.take_orders()
    moved = [[5, 7, 6], [0, 8, 9], [0, 0, 0, 2, 3]]
    assert half.finished("r", moved, by_length=True) is None
    assert half.take_orders() == [Withdraw(LEASE_ID)]


# --- fetching -------------------------------------------------------------------------------------


def test_a_good_reference_is_held_while_the_request_queues_and_then_fetched() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, reference(1)))
    [hold] = half.take_orders()
    assert hold == Hold("r/1", lease_of(1))
    assert half.num_elsewhere("r", 4) == half.num_elsewhere("r", 4) == 5
    half.allocated("r", BLOCKS, 5)
    half.allocated("r", BLOCKS, 0)
    assert half.take_orders() == [
        Fetch("r/1", "r", lease_of(1), prompt("r").digest, {1: 7, 2: 6}, 9)
    ]
    assert half.awaited(set(), {"r"}) == (set(), {"r"})
    assert half.num_elsewhere("r", 0) == 0, "if it is preempted, it is computed here"
    assert half.awaited(set(), {"r"}) == (set(), set())
    half.finished("r", BLOCKS, by_length=True)
    assert half.take_orders() == []
    assert (len(half), half.take_figures()) == (0, {"reports_dropped": 1})


@pytest.mark.parametrize(
    ("lent", "num_here", "num_tokens", "wanted"),
    [
        (7, 0, 7, {0: 5, 1: 7}),
        (8, 0, 8, {0: 5, 1: 7}),
        (9, 0, 9, {0: 5, 1: 7, 2: 6}),
        (7, 4, 3, {1: 7}),
        (9, 8, 1, {2: 6}),
        (8, 8, 0, {}),
        (3, 8, 0, {}),
    ],
)
def test_a_reference_serves_a_prompt_that_goes_on(
    lent: int, num_here: int, num_tokens: int, wanted: dict[int, int]
) -> None:
    """The prompt has a tenth token at least, which is computed here."""
    half = make_half()
    half.arrived(prompt("r", 10, reference(1, lent)))
    half.take_orders()
    assert half.num_elsewhere("r", num_here) == num_tokens
    half.allocated("r", BLOCKS, num_tokens)
    fetch = Fetch("r/1", "r", lease_of(1), prompt("", lent).digest, wanted, lent)
    assert half.take_orders() == [fetch if wanted else Cancel("r/1")]


@pytest.mark.parametrize(
    ("num_here", "wanted"),
    [
        (0, {0: 5, 1: 7, 2: 6, 3: 8, 4: 9, 5: 1, 6: 2, 7: 3}),
        (4, {1: 7, 2: 6, 3: 8, 4: 9, 5: 1, 6: 2, 7: 3}),
        (8, {2: 6, 4: 9, 7: 3}),
    ],
)
def test_blocks_of_every_group_are_fetched_but_those_that_are_here(
    num_here: int, wanted: dict[int, int]
) -> None:
    half = make_half(WINDOWS)
    half.arrived(prompt("r", 10, reference(1, 9, groups=WINDOWS)))
    half.take_orders()
    half.allocated("r", BLOCKS_OF_WINDOWS, half.num_elsewhere("r", num_here))
    assert half.take_orders() == [Fetch("r/1", "r", lease_of(1), prompt("r").digest, wanted, 9)]


@pytest.mark.parametrize(
    "block_ids",
    [
        [[5, 7, 6], [0, 8, 9], [0, 0, 0, 2, 3]],
        [[5, 7, 6], [4, 8, 9], [0, 0, 1, 2, 3]],
        [[5, 7, 6], [0, 8], [0, 0, 1, 2, 3]],
    ],
    ids=["a block too few", "a block too many", "short"],
)
def test_blocks_that_a_lease_does_not_fill_are_failed_not_guessed(
    block_ids: list[list[int]],
) -> None:
    half = make_half(WINDOWS)
    half.arrived(prompt("r", 10, reference(1, 9, groups=WINDOWS)))
    half.allocated("r", block_ids, half.num_elsewhere("r", 0))
    assert half.take_orders()[1:] == [Cancel("r/1"), Fail("r")]


@pytest.mark.parametrize(("num_tokens", "is_fetched"), [(9, False), (10, False), (11, True)])
def test_a_last_token_that_attends_to_a_dropped_one_is_computed_here_with_all_before_it(
    num_tokens: int, is_fetched: bool
) -> None:
    """vLLM computes the last token again, whose windows begin before those of the lease."""
    half = make_half(WINDOWS)
    half.arrived(prompt("r", num_tokens, reference(1, num_tokens, groups=WINDOWS)))
    hold, release = Hold("r/1", lease_of(1)), Release(lease_of(1))
    assert half.take_orders() == [hold if is_fetched else release]
    assert half.num_elsewhere("r", 0) == (num_tokens if is_fetched else 0)
    half.arrived(prompt("s", num_tokens, reference(1, num_tokens, groups=WINDOWS)))
    assert half.num_elsewhere("s", 0) == num_tokens, "it was used, so it fails"


def test_a_reference_is_for_the_beginning_of_a_prompt_and_its_salt() -> None:
    half = make_half()
    others = {
        "another beginning": Arrival("", [9, *range(1, 10)], 10, None, reference(1)),
        "another salt": Arrival("", list(range(10)), 10, "salt", reference(1)),
        "shorter": prompt("", 8, reference(1)),
        "from the second token on": Arrival("", list(range(1, 11)), 10, None, reference(1)),
    }
    for name, arrival in others.items():
        half.arrived(dataclasses.replace(arrival, request_id=name))
        num_tokens = half.num_elsewhere(name, 0)
        assert num_tokens == arrival.num_tokens, "or it would be computed here, as if it had none"
        half.allocated(name, BLOCKS, num_tokens)
    assert half.take_orders() == [Fail(name) for name in others]


@pytest.mark.parametrize(
    ("params", "num_tokens"),
    [
        (reference(1, remote_num_tokens=8), 9),
        (reference(1, lease_id="b" * 32), 9),
        (reference(1, 10), 9),
        (reference(1) | {"remote_host": "example.org"}, 9),
        ({"do_remote_prefill": True}, 9),
        ({"do_remote_prefill": 1}, 9),
        ("not even a dict", 9),
    ],
    ids=["edited", "forged", "other prompt", "a name", "empty", "wrong type", "garbage"],
)
def test_a_bad_reference_fails_its_request_and_reaches_nobody(params: Any, num_tokens: int) -> None:
    half = make_half()
    half.arrived(prompt("r", num_tokens, params))
    assert half.take_orders() == []
    assert half.num_elsewhere("r", 0) == num_tokens
    half.allocated("r", BLOCKS, num_tokens)
    assert half.take_orders() == [Fail("r")]
    half.finished("r", [[]], by_length=False)
    assert half.awaited(set(), {"r"}) == (set(), {"r"})
    assert [order for order in half.take_orders() if isinstance(order, Release)] == []
    assert len(half) == 0


def test_a_reference_serves_once() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, reference(1)))
    half.arrived(prompt("s", 9, reference(1)))
    half.take_orders()
    half.allocated("s", BLOCKS, half.num_elsewhere("s", 0))
    assert half.take_orders() == [Fail("s")]


def test_a_lease_is_given_back_when_its_request_goes_before_it_is_scheduled() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, reference(1)))
    half.finished("r", [[]], by_length=False)
    assert half.take_orders() == [Hold("r/1", lease_of(1)), Cancel("r/1")]
    assert len(half) == 0


def test_a_request_that_goes_while_it_is_fetched_is_awaited_all_the_same() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, reference(1)))
    half.allocated("r", BLOCKS, half.num_elsewhere("r", 0))
    half.take_orders()
    half.finished("r", [[]], by_length=False)
    assert half.take_orders() == [Cancel("r/1")]
    assert half.awaited(set(), {"r"}) == (set(), {"r"}), "vLLM keeps the blocks until then"


def rejection(params: Any) -> Arrival:
    """What vLLM's front-end adds, and aborts at once, when it has refused a request."""
    return Arrival("rejected", [0], 1, None, params, rejected=True)


@pytest.mark.parametrize(
    "params",
    [reference(1), reference(1, remote_num_tokens=8), reference(1, remote_block_ids="garbage")],
    ids=["whole", "edited elsewhere", "garbled elsewhere"],
)
def test_a_rejection_gives_the_lease_back_that_it_names(params: Any) -> None:
    half = make_half()
    half.arrived(rejection(params))
    assert half.take_orders() == [Release(lease_of(1))]
    half.finished("rejected", [[]], by_length=False)
    assert (half.take_orders(), len(half)) == ([], 0)


@pytest.mark.parametrize(
    "params",
    [reference(1, lease_id="b" * 32), reference(1, remote_host="10.0.0.9"), {}, "garbage"],
    ids=["another lease", "another place", "nothing", "garbage"],
)
def test_a_rejection_that_is_not_signed_reaches_nobody(params: Any) -> None:
    half = make_half()
    half.arrived(rejection(params))
    assert half.take_orders() == []


def test_a_rejection_does_not_take_a_lease_from_the_request_that_came_with_it() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, reference(1)))
    half.take_orders()
    half.arrived(rejection(reference(1)))
    assert half.take_orders() == []


def test_a_prefill_engine_hears_of_its_own_lease_s_rejection() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, FOR_OTHERS))
    answer = half.finished("r", BLOCKS, by_length=True)
    half.take_orders()
    half.arrived(rejection(answer))
    assert half.take_orders() == [Revoke(LEASE_ID)]


def test_a_lease_is_given_back_when_vllm_loads_nothing() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, reference(1)))
    half.allocated("r", BLOCKS, 0)
    assert half.take_orders() == [Hold("r/1", lease_of(1)), Cancel("r/1")]
    assert half.num_elsewhere("r", 0) == 0


def test_a_part_that_is_not_whole_is_failed_not_guessed() -> None:
    half = make_half()
    half.arrived(prompt("r", 9, reference(1)))
    half.num_elsewhere("r", 0)
    half.allocated("r", BLOCKS, 8)
    assert half.take_orders()[1:] == [Cancel("r/1"), Fail("r")]


# --- the rest -------------------------------------------------------------------------------------


def test_reports_of_what_nobody_waits_for_are_dropped_and_counted() -> None:
    half = make_half()
    half.arrived(prompt("plain", 9, None))
    assert half.awaited({"plain", "unknown"}, {"plain"}) == (set(), set())
    assert half.take_figures() == {"reports_dropped": 2}


def test_bad_references_are_counted() -> None:
    half = make_half(fetches=False)
    half.arrived(prompt("r", 8, reference(1)))
    half.arrived(prompt("s", 8, "garbage"))
    assert half.take_figures() == {"references_refused": 2}
    assert half.take_figures() == {}


def test_orders_leave_once() -> None:
    half = make_half()
    assert not half.has_orders
    half.reset()
    assert half.has_orders
    assert half.take_orders() == [RevokeAll()]
    assert not half.has_orders
    assert half.take_orders() == []


def test_an_identity_names_all_that_the_kv_depends_on() -> None:
    assert identity_of(None, None, []) is None
    identities = [
        identity_of("a", None, []),
        identity_of(None, "a", []),
        identity_of(None, None, ["a"]),
        identity_of(None, None, ["a", "a"]),
        identity_of("", None, []),
    ]
    assert len({None, *identities}) == 6
