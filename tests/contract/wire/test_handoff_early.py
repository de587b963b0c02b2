"""D is told of a request while P computes its prompt: blocks travel early; nothing needs them to.

Two real engines in this process, joined by UCX.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from engine_kit.control import LONG, Owner
from engine_kit.core import core_request, generate
from waits import Deadline, source_of

from diptych_engine.scheduling.early_loads import EarlyState
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_protocol import (
    FinishReason,
    InvalidRequestError,
    KVTransferConfig,
    KVTransferParams,
    KVTransferStats,
    fingerprint,
)

PROMPT = [number % 61 for number in range(150)]
"""Five steps of prefill: an `Owner` computes 32 tokens a step."""
LEASE = "0123456789abcdef" * 2
Json = dict[str, Any]


class Pair:
    """A prefill and a decode engine, and what a router would say to them."""

    def __init__(self, **decode: Any) -> None:
        self.prefill = Owner(kv_transfer=KVTransferConfig(), engine_id="prefill")
        hinge = KVTransferConfig(load_timeout_s=decode.pop("load_timeout_s", 60.0))
        self.decode = Owner(kv_transfer=hinge, engine_id="decode", **decode)
        self.begin()

    def begin(self) -> None:
        """Forget what was: nothing is remembered of prompts, and `p` and `d` count from here."""
        for owner in (self.prefill, self.decode):
            assert owner.core.scheduler.pool.forget_all(), "blocks are still in use"
            owner.outputs.clear()
        self._before = self._stats(self.prefill), self._stats(self.decode)

    def _stats(self, owner: Owner) -> KVTransferStats:
        stats = owner.core.hand_offs.stats()
        assert stats is not None
        return msgspec.structs.replace(stats)

    def close(self) -> None:
        for owner in (self.prefill, self.decode):
            owner.core.close()

    def compute(self, name: str = "p", lease: str | None = LEASE) -> None:
        """Have P compute the prompt for somebody else."""
        params = {"do_remote_decode": True, "lease_id": lease}
        extra = {"kv_transfer_params": params}
        self.prefill.add(name, PROMPT, max_tokens=1, extra_args=extra)

    def announced(self, **changes: Any) -> Json:
        description = self.prefill.core.description
        return {
            "do_remote_prefill": True,
            "remote_engine_id": description.engine_id,
            "remote_host": description.kv_transfer_host,
            "remote_port": description.kv_transfer_port,
            "epoch": description.epoch,
            "compat": fingerprint(description.compat),
            "proof": description.kv_transfer_proof,
            "lease_id": LEASE,
            "remote_num_tokens": len(PROMPT),
            **changes,
        }

    def announce(self, name: str = "d", **changes: Any) -> bool:
        extra = {"kv_transfer_params": self.announced(**changes)}
        request = core_request(name, PROMPT, extra_args=extra, **LONG)
        return bool(self.decode.call("announce_kv_transfer", request))

    def lent(self, name: str = "p") -> Json:
        """What P says when it has computed the prompt."""
        self.until(lambda: self.prefill.ended(name))
        params = self.prefill.outputs[name][-1].kv_transfer_params
        assert params is not None
        return params

    def come(self, lent: Json, name: str = "d") -> None:
        self.decode.add(name, PROMPT, extra_args={"kv_transfer_params": lent})

    def until(self, condition: Callable[[], Any], *, prefill: bool = True) -> None:
        """Let both engines go on, or D alone."""
        deadline = Deadline(source_of(condition))
        while not condition():
            deadline.check()
            fds = [o.connector.wake_fd for o in (self.prefill, self.decode)]
            if not ((prefill and self.prefill.core.has_work) or self.decode.core.has_work):
                select.select(fds, [], [], 0.02)
            if prefill:
                self.prefill.turn()
            self.decode.turn()

    def p(self) -> KVTransferStats:
        return since(self._before[0], self._stats(self.prefill))

    def d(self) -> KVTransferStats:
        return since(self._before[1], self._stats(self.decode))

    @property
    def ready(self) -> bool:
        """D has the blocks, and P has them back, before the request has even come."""
        loads = self.decode.core.scheduler.early.loads.values()
        return all(load.state is EarlyState.READY for load in loads) and (
            self.prefill.all_blocks_free and self.p().leases_released == 1
        )

    def assert_nothing_is_left(self) -> None:
        self.until(lambda: self.prefill.all_blocks_free and self.decode.all_blocks_free)
        for stats in (self.p(), self.d()):
            assert stats.leases_promised == stats.leases_granted + stats.leases_withdrawn
            ended = stats.leases_released + stats.leases_revoked + stats.leases_expired
            assert stats.leases_granted == ended
            assert stats.loads_started == stats.loads_completed + stats.loads_failed
            assert stats.early_loads == stats.early_loads_adopted + stats.early_loads_dropped
            here = stats.leases_held, stats.leases_promised_now, stats.leases_draining
            assert (*here, stats.loads_in_flight, stats.early_loads_now) == (0, 0, 0, 0, 0)


def since(before: KVTransferStats, now: KVTransferStats) -> KVTransferStats:
    """What was counted meanwhile."""
    numbers = {
        name: value - getattr(before, name)
        for name in KVTransferStats.__struct_fields__
        if isinstance(value := getattr(now, name), int)
    }
    return msgspec.structs.replace(now, **numbers)


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def pair(engines: Pair) -> Pair:
    engines.begin()
    return engines


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return generate(Owner().core, PROMPT, **LONG)


@pytest.mark.parametrize("first", ["announcement", "prefill"])
def test_blocks_travel_while_prefill_computes_and_the_request_runs_at_once(
    pair: Pair, expected: list[int], first: str
) -> None:
    if first == "prefill":
        pair.compute()
    assert pair.announce()
    if first == "announcement":
        driver: Any = pair.prefill.connector._driver
        pair.until(lambda: driver._hinge.leases._early, prefill=False)
        pair.compute()
    pair.prefill.turn(3)
    assert not pair.prefill.ended("p")
    pair.until(lambda: pair.p().blocks_sent >= 4, prefill=False)
    lent = pair.lent()
    pair.until(lambda: pair.ready)
    pair.come(lent)
    pair.decode.turn()
    assert len(pair.decode.tokens("d")) == 2, "P's token, and the next one at once"
    pair.until(lambda: pair.decode.ended("d"))
    assert pair.decode.tokens("d") == expected
    assert pair.d().blocks_received == -(-len(PROMPT) // 16)
    assert pair.d().early_loads_adopted == 1
    pair.assert_nothing_is_left()


def test_a_request_that_comes_before_its_blocks_waits_for_them(
    pair: Pair, expected: list[int]
) -> None:
    pair.compute()
    assert pair.announce()
    while not pair.prefill.ended("p"):
        pair.prefill.turn()  # and D does not look
    pair.come(pair.lent())
    pair.until(lambda: pair.decode.ended("d"))
    assert pair.decode.tokens("d") == expected
    assert pair.d().early_loads_adopted == 1
    pair.assert_nothing_is_left()


def test_prefill_that_loses_its_blocks_sends_none_twice(pair: Pair, expected: list[int]) -> None:
    pair.compute()
    assert pair.announce()
    pair.prefill.turn(3)
    pair.until(lambda: pair.p().blocks_sent >= 4, prefill=False)
    pair.prefill.core.scheduler.preempt_all()
    pair.come(pair.lent())
    pair.until(lambda: pair.decode.ended("d"))
    assert pair.decode.tokens("d") == expected
    assert pair.p().blocks_sent == -(-len(PROMPT) // 16)
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("turns", [0, 2])
def test_an_aborted_prefill_frees_both_sides(pair: Pair, turns: int) -> None:
    pair.compute()
    assert pair.announce()
    pair.prefill.turn(turns)
    pair.prefill.core.abort(["p"])
    pair.prefill.turn()
    pair.assert_nothing_is_left()
    assert pair.p().leases_withdrawn == 1
    assert pair.d().early_loads_dropped == 1


@pytest.mark.parametrize("when", ["at once", "under way", "complete"])
def test_a_request_that_will_not_come_frees_decode_and_leaves_the_lease(
    pair: Pair, expected: list[int], when: str
) -> None:
    pair.compute()
    assert pair.announce()
    if when != "at once":
        pair.prefill.turn(2)
        pair.until(lambda: pair.p().blocks_sent > 0, prefill=False)
    if when == "complete":
        pair.lent()
        pair.until(lambda: pair.ready)
    pair.decode.core.abort(["d"])
    pair.until(lambda: pair.decode.all_blocks_free)
    if when != "complete":
        pair.come(pair.lent(), "another")
        pair.until(lambda: pair.decode.ended("another"))
        assert pair.decode.tokens("another") == expected
    pair.assert_nothing_is_left()


def test_an_announcement_ends_by_itself(expected: list[int]) -> None:
    pair = Pair(load_timeout_s=0.5)
    try:
        pair.compute()
        assert pair.announce()
        assert pair.announce(), "saying it again is harmless"
        assert pair.d().early_loads == 1
        pair.until(lambda: pair.d().early_loads_dropped == 1, prefill=False)
        pair.until(lambda: pair.decode.all_blocks_free, prefill=False)
        pair.come(pair.lent())
        pair.until(lambda: pair.decode.ended("d"))
        assert pair.decode.tokens("d") == expected
        pair.assert_nothing_is_left()
    finally:
        pair.close()


def test_a_complete_load_that_nobody_comes_for_is_freed() -> None:
    pair = Pair(load_timeout_s=1.0)
    try:
        pair.compute()
        assert pair.announce()
        pair.until(lambda: pair.d().loads_completed == 1)
        pair.assert_nothing_is_left()
        assert pair.d().early_loads_dropped == 1
    finally:
        pair.close()


def test_without_room_only_the_connection_is_made(expected: list[int]) -> None:
    pair = Pair(num_blocks=16)  # of which the prompt needs 10
    try:
        pair.compute()
        assert not pair.announce()
        assert pair.decode.all_blocks_free
        pair.come(pair.lent())
        pair.until(lambda: pair.decode.ended("d"))
        assert pair.decode.tokens("d") == expected
        pair.assert_nothing_is_left()
    finally:
        pair.close()


def test_those_who_are_here_take_the_blocks_of_those_who_are_not(pair: Pair) -> None:
    pair.compute()
    assert pair.announce()
    pair.until(lambda: pair.d().loads_completed == 1)
    for number in range(3):
        pair.decode.add(f"r{number}", [number] * 300, max_tokens=20)
    pair.until(lambda: all(pair.decode.ended(f"r{number}") for number in range(3)))
    assert pair.d().early_loads_dropped == 1
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("what", ["other tokens", "other lease"])
def test_a_request_other_than_announced_gets_nothing_of_it(
    pair: Pair, expected: list[int], what: str
) -> None:
    if what == "other lease":
        pair.compute("first")
        assert pair.announce()
        pair.compute("second", lease=None)
        pair.come(pair.lent("second"))
    else:
        pair.compute()
        extra = {"kv_transfer_params": pair.announced()}
        request = core_request("d", [9, *PROMPT[1:]], extra_args=extra, **LONG)
        assert pair.decode.call("announce_kv_transfer", request)
        pair.come(pair.lent())
    pair.until(lambda: pair.decode.ended("d"))
    assert pair.decode.tokens("d") == expected
    assert pair.d().early_loads_adopted == 0
    if what == "other lease":
        pair.prefill.core.call("reject_kv_transfer", ["first", pair.lent("first")])
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("changes", [{"remote_num_tokens": 151}, {"lease_id": None}, {"epoch": 3}])
def test_a_malformed_announcement_is_refused(pair: Pair, changes: Json) -> None:
    with pytest.raises(InvalidRequestError):
        pair.announce(**changes)
    assert pair.decode.all_blocks_free


def test_an_announcement_of_an_engine_that_is_not_there_costs_nothing(pair: Pair) -> None:
    params = KVTransferParams.parse(pair.announced(remote_port=1))
    assert pair.announce(remote_port=1, proof=References(PUBLIC_KEY).proof_of_engine(params))
    pair.until(lambda: pair.decode.all_blocks_free, prefill=False)
    assert pair.d().early_loads_dropped == 1


@pytest.mark.parametrize("lease", ["x" * 32, "0" * 31, "0" * 33, ""])
def test_a_router_s_lease_id_has_128_bits(pair: Pair, lease: str) -> None:
    pair.compute(lease=lease)
    pair.prefill.turn()
    assert pair.prefill.ended("p") is FinishReason.ERROR


def test_a_lease_id_belongs_to_one_request(pair: Pair) -> None:
    pair.compute("first")
    pair.compute("second")
    pair.prefill.turn()
    assert pair.prefill.ended("second") is FinishReason.ERROR
    assert "lease" in (pair.prefill.outputs["second"][-1].error or "")
    pair.prefill.core.call("reject_kv_transfer", ["first", pair.lent("first")])
    pair.assert_nothing_is_left()
    pair.compute("third")
    assert pair.lent("third")["lease_id"] == LEASE
    pair.prefill.core.call("reject_kv_transfer", ["third", pair.lent("third")])
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("meanwhile", ["nothing", "complete", "reset"])
def test_a_request_that_comes_during_a_pause_waits_for_its_end(
    pair: Pair, expected: list[int], meanwhile: str
) -> None:
    pair.compute()
    assert pair.announce()
    pair.decode.core.call("pause_generation", ["wait", False])
    while not pair.prefill.ended("p"):
        pair.prefill.turn()
    if meanwhile == "complete":
        pair.until(lambda: pair.ready)
    pair.come(pair.lent())
    if meanwhile == "reset":
        assert pair.decode.call("reset_prefix_cache", True) is True
    else:
        pair.until(lambda: pair.ready)
    pair.decode.turn(3)
    assert not pair.decode.tokens("d"), "P's token comes with D's first"
    assert not pair.decode.core.scheduler.loading
    pair.decode.call("resume_generation")
    pair.until(lambda: pair.decode.ended("d"))
    assert pair.decode.tokens("d") == expected
    assert pair.d().early_loads_adopted == (meanwhile != "reset")
    pair.assert_nothing_is_left()


def test_a_large_request_before_it_in_the_queue_gets_its_blocks(expected: list[int]) -> None:
    """Whoever is first takes what others only wait with; they compute their prompts."""
    pair = Pair(num_blocks=20)
    try:
        pair.compute()
        assert pair.announce()
        pair.until(lambda: pair.ready)
        pair.decode.core.call("pause_generation", ["wait", False])
        pair.decode.add("large", [5] * 200, max_tokens=4)  # 13 blocks, and 10 are free
        pair.come(pair.lent())
        pair.decode.call("resume_generation")
        pair.until(lambda: pair.decode.ended("large") and pair.decode.ended("d"))
        assert pair.decode.tokens("d") == expected
        assert pair.decode.order == ["large", "d"]
        assert pair.d().early_loads_dropped == 1
        pair.assert_nothing_is_left()
    finally:
        pair.close()


@pytest.mark.parametrize("level", [0, 1])
def test_sleep_of_either_side_leaves_nothing_on_its_way(
    pair: Pair, expected: list[int], level: int
) -> None:
    pair.compute()
    assert pair.announce()
    pair.prefill.turn(2)
    done = pair.decode.core.call("sleep", [level, "keep"])
    pair.until(done.done, prefill=False)
    assert level == 0 or pair.decode.all_blocks_free
    pair.decode.call("wake_up")
    pair.come(pair.lent())
    pair.until(lambda: pair.decode.ended("d"))
    assert pair.decode.tokens("d") == expected
    pair.assert_nothing_is_left()
