"""Pauses, sleep and resets of engines that lend and fetch KV: nobody reads or writes what goes."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from engine_kit.control import LONG, Owner
from engine_kit.core import CLIENT, generate
from engine_kit.geometry import totals
from waits import Deadline, source_of

from diptych_protocol import FinishReason, KVTransferConfig, KVTransferParams

PROMPT = [number % 61 for number in range(100)]
FIRST_CONTACT_S = 0.1
TRIES = 10
Json = dict[str, Any]


class Pair:
    """A prefill and a decode engine in this process, joined by UCX."""

    def __init__(self) -> None:
        hinge = KVTransferConfig(lease_seconds=30.0)
        self.prefill = Owner(kv_transfer=hinge, engine_id="prefill")
        self.decode = Owner(kv_transfer=hinge, engine_id="decode", max_num_waiting=2)
        self._count = 0

    def close(self) -> None:
        for owner in (self.prefill, self.decode):
            owner.core.close()

    def lend(self) -> Json:
        """What P says when it has computed the prompt."""
        name = f"p{self._count}"
        self._count += 1
        params = {"kv_transfer_params": {"do_remote_decode": True}}
        self.prefill.add(name, PROMPT, max_tokens=1, extra_args=params)
        self.prefill.finish(name)
        lent = self.prefill.outputs[name][-1].kv_transfer_params
        assert lent is not None
        assert not self.prefill.all_blocks_free
        return lent

    def fetch(self, name: str, lent: Json) -> None:
        """A request whose KV D is to fetch from P."""
        self.decode.add(name, PROMPT, extra_args={"kv_transfer_params": lent})

    def until(self, condition: Callable[[], Any]) -> None:
        """Both engines go on meanwhile."""
        deadline = Deadline(source_of(condition))
        while not condition():
            deadline.check()
            fds = [o.connector.wake_fd for o in (self.prefill, self.decode)]
            if not (self.prefill.core.has_work or self.decode.core.has_work):
                select.select(fds, [], [], 0.05)
            self.prefill.turn()
            self.decode.turn()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return generate(Owner().core, PROMPT, **LONG)


def asleep(owner: Owner, level: int, mode: str) -> Callable[[], bool]:
    answer: Future[Any] = owner.core.call("sleep", [level, mode])
    return answer.done


@pytest.mark.parametrize("state", ["paused", "full", "asleep 0", "asleep 1", "asleep 2"])
def test_contract_C08_a_rejection_frees_prefill_whatever_state_decode_is_in(
    pair: Pair, state: str
) -> None:
    lent = pair.lend()
    if state == "full":
        for name in ("w1", "w2"):
            pair.decode.add(name)
        assert not pair.decode.core.scheduler.can_add()
    elif state == "paused":
        pair.decode.add("kept")
        pair.decode.turn(2)
        pair.decode.call("pause_generation", "keep", False)
    else:
        pair.decode.call("sleep", int(state[-1]), "abort")
    pair.decode.core.call("reject_kv_transfer", ["refused", lent])
    pair.until(lambda: pair.prefill.all_blocks_free)
    assert totals(pair.prefill).leases_revoked == 1
    pair.decode.core.call("reject_kv_transfer", ["refused", lent])
    pair.decode.turn()
    assert "refused" not in pair.decode.core.scheduler.requests, "no request is made of it"
    again = pair.lend()
    pair.decode.core.call("reject_kv_transfer", ["refused", again])
    pair.until(lambda: pair.prefill.all_blocks_free)
    assert totals(pair.prefill).leases_revoked == 2


def test_contract_C08_a_rejection_on_first_contact_takes_less_than_a_tenth_of_a_second() -> None:
    """At the best of a few tries: the others tell of what else this machine does."""
    seconds: list[float] = []
    while len(seconds) < TRIES and min(seconds, default=1.0) >= FIRST_CONTACT_S:
        with closing(Pair()) as pair:
            lent = pair.lend()
            begun = time.perf_counter()
            pair.decode.core.call("reject_kv_transfer", ["refused", lent])
            pair.until(lambda: pair.prefill.all_blocks_free)
            seconds.append(time.perf_counter() - begun)
    assert min(seconds) < FIRST_CONTACT_S, seconds


@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_contract_C08_prefill_itself_can_be_told_while_it_is_paused(pair: Pair, state: str) -> None:
    lent = pair.lend()
    if state == "paused":
        pair.prefill.call("pause_generation", "keep", False)
    else:
        pair.prefill.call("sleep", 0, "wait")
    pair.prefill.core.call("reject_kv_transfer", ["refused", lent])
    pair.until(lambda: pair.prefill.all_blocks_free)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_contract_C16_sleep_of_prefill_calls_back_what_it_lent(
    pair: Pair, mode: str, expected: list[int]
) -> None:
    lent = pair.lend()
    pair.until(asleep(pair.prefill, 1, mode))
    assert pair.prefill.core.stats().sleep_level == 1
    assert pair.prefill.all_blocks_free
    pair.fetch("late", lent)
    pair.until(lambda: pair.decode.ended("late"))
    [*_, last] = pair.decode.outputs["late"]
    assert last.finish_reason is FinishReason.ERROR, "never other text: the lease has ended"
    assert "revoked" in (last.error or "")
    pair.prefill.call("wake_up")
    pair.fetch("after", pair.lend())
    pair.until(lambda: pair.decode.ended("after"))
    assert pair.decode.tokens("after") == expected, "the hinge works as before"


def test_contract_C16_a_sleep_that_waits_lets_decode_fetch_what_was_lent(
    pair: Pair, expected: list[int]
) -> None:
    lent = pair.lend()
    done = asleep(pair.prefill, 1, "wait")
    pair.prefill.turn(3)
    assert not done()
    pair.fetch("a", lent)
    pair.until(done)
    pair.until(lambda: pair.decode.ended("a"))
    assert pair.decode.tokens("a") == expected


@pytest.mark.parametrize("level", [0, 1, 2])
def test_contract_C16_kept_requests_that_fetch_when_decode_falls_asleep_end_as_they_should(
    pair: Pair, level: int, expected: list[int]
) -> None:
    pair.fetch("a", pair.lend())
    pair.decode.turn()
    assert pair.decode.core.scheduler.loading
    pair.until(asleep(pair.decode, level, "keep"))
    if level:
        assert not pair.decode.core.scheduler.loading
        assert pair.decode.all_blocks_free
    pair.fetch("while asleep", pair.lend())
    pair.decode.turn(3)
    assert not pair.decode.tokens("a")
    pair.decode.call("wake_up")
    pair.until(lambda: pair.decode.ended("a") and pair.decode.ended("while asleep"))
    assert pair.decode.tokens("a") == pair.decode.tokens("while asleep") == expected
    pair.until(lambda: pair.prefill.all_blocks_free and pair.decode.all_blocks_free)


def test_contract_C16_aborted_loads_end_before_the_memory_goes(pair: Pair) -> None:
    pair.fetch("a", pair.lend())
    pair.decode.turn()
    pair.until(asleep(pair.decode, 2, "abort"))
    assert pair.decode.ended("a") is FinishReason.ABORT
    assert not pair.decode.core.scheduler.loading
    pair.until(lambda: pair.prefill.all_blocks_free)


def test_contract_C15_a_forced_reset_uses_nothing_that_is_on_its_way(
    pair: Pair, expected: list[int]
) -> None:
    pair.fetch("a", pair.lend())
    pair.decode.turn()
    assert pair.decode.core.scheduler.loading
    assert pair.decode.core.call("reset_prefix_cache", [True]) is True
    pair.until(lambda: pair.decode.ended("a"))
    assert pair.decode.tokens("a") == expected
    assert pair.decode.core.stats().remote_kv_tokens == 0
    assert pair.decode.core.stats().prompt_tokens_computed >= len(PROMPT)
    pair.until(lambda: pair.prefill.all_blocks_free and pair.decode.all_blocks_free)


def test_contract_C15_with_the_connector_what_was_lent_is_called_back(pair: Pair) -> None:
    pair.lend()
    assert pair.prefill.call("reset_prefix_cache") is False, "lent blocks are in use"
    assert pair.prefill.call("reset_prefix_cache", True) is True
    assert not pair.prefill.all_blocks_free, "a reader may still come"
    done = pair.prefill.core.call("reset_prefix_cache", [False, True])
    pair.until(done.done)
    assert done.result() is True
    assert pair.prefill.all_blocks_free


def test_the_address_of_the_cache_outlives_a_sleep(pair: Pair) -> None:
    runner: Any = pair.decode.core.runner
    before = runner.kv_cache.data_ptr()
    runner.kv_cache.fill_(1.0)
    pair.until(asleep(pair.decode, 1, "abort"))
    pair.decode.call("wake_up")
    assert runner.kv_cache.data_ptr() == before
    assert not runner.kv_cache.any(), "its pages went, and came back as zeros"
    assert KVTransferParams.parse(pair.lend()).do_remote_prefill


def test_contract_C08_a_request_that_is_here_keeps_its_lease(pair: Pair) -> None:
    """What becomes of the lease is its affair, also when it has ended."""
    lent = pair.lend()
    pair.fetch("here", lent)
    for _ in range(2):
        pair.decode.core.call("reject_kv_transfer", ["here", lent])
        pair.until(lambda: pair.decode.ended("here"))
    assert pair.decode.ended("here") is FinishReason.LENGTH
    assert totals(pair.prefill).leases_revoked == 0


def test_contract_C08_an_id_comes_back_only_when_nobody_writes_to_its_blocks(pair: Pair) -> None:
    """Else the end of the first load would be taken for that of the second."""
    lent = pair.lend()
    pair.fetch("again", lent)
    pair.decode.turn()  # begins to load
    assert pair.decode.core.scheduler.loading
    pair.decode.core.abort(["again"])
    pair.fetch("again", lent)
    [aborted, refused] = pair.decode.core.take_outputs()[CLIENT]
    assert aborted.finish_reason is FinishReason.ABORT
    assert refused.finish_reason is FinishReason.ERROR
    pair.until(lambda: pair.decode.all_blocks_free and pair.prefill.all_blocks_free)
    pair.fetch("again", pair.lend())
    pair.until(lambda: pair.decode.ended("again"))
    assert pair.decode.ended("again") is FinishReason.LENGTH
