"""Pausing one EngineCore in each mode, step by step."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from engine_kit.control import LONG, Owner, undisturbed
from engine_kit.core import generate

from diptych_engine.scheduling.pause import PauseGate, PauseState
from diptych_engine.scheduling.waiting_queue import make_queue
from diptych_frontend.fair_share import FairShare
from diptych_protocol import DiptychError, FinishReason, PauseMode

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return undisturbed()


def test_contract_C20_abort_ends_what_runs_with_partial_text_and_queues_what_comes(
    expected: list[int],
) -> None:
    owner = Owner()
    owner.add("a")
    owner.turn(6)
    owner.add("waiting")
    owner.call("pause_generation", "abort", True)
    assert (owner.ended("a"), owner.ended("waiting")) == (FinishReason.ABORT, FinishReason.ABORT)
    assert owner.tokens("a") == expected[: len(owner.tokens("a"))] != []
    assert owner.all_blocks_free
    owner.add("late")
    owner.turn(5)
    assert owner.outputs["late"] == [], "it waits, and was not refused"
    assert owner.core.stats().paused
    owner.call("resume_generation")
    owner.finish("late")
    assert owner.tokens("late") == expected


def test_contract_C20_wait_lets_what_runs_end_and_resolves_only_then(expected: list[int]) -> None:
    owner = Owner()
    owner.add("a")
    owner.turn(3)
    paused = owner.core.call("pause_generation", ["wait", True])
    owner.add("late")
    owner.turn(3)
    assert not paused.done()
    owner.until(paused.done)
    assert (owner.ended("a"), owner.tokens("a")) == (FinishReason.LENGTH, expected)
    assert owner.outputs["late"] == []
    owner.call("resume_generation")
    owner.finish("late")


@pytest.mark.parametrize("clear_cache", [True, False])
def test_contract_C20_keep_freezes_and_goes_on_with_the_same_tokens(
    clear_cache: bool, expected: list[int]
) -> None:
    owner = Owner()
    owner.add("a")
    owner.add("b", [2, 7, 1], temperature=1.0, seed=7)
    owner.turn(10)
    owner.call("pause_generation", "keep", clear_cache)
    owner.turn()
    so_far = owner.tokens("a")
    assert not owner.core.has_work
    owner.turn(5)
    assert owner.tokens("a") == so_far
    assert (len(owner.core.scheduler.running) == 0) == clear_cache
    owner.call("resume_generation")
    owner.finish("a", "b")
    assert owner.tokens("a") == expected
    calm = generate(owner.core, [2, 7, 1], temperature=1.0, seed=7, **LONG)
    assert owner.tokens("b") == calm


def test_contract_C20_a_pause_forgets_prefixes_only_if_asked() -> None:
    owner = Owner()
    prompt = list(range(40))
    for clear_cache, hit in ((False, 32), (True, 0)):
        owner.add("first", prompt, max_tokens=2)
        owner.finish("first")
        owner.call("pause_generation", "wait", clear_cache)
        owner.call("resume_generation")
        owner.add("again", prompt, max_tokens=2)
        owner.finish("again")
        assert owner.outputs["again"][-1].num_cached_tokens == hit


def test_contract_C21_queued_requests_finish_in_the_order_in_which_they_came() -> None:
    owner = Owner(max_num_seqs=1)
    assert owner.call("is_paused") is False
    owner.add("before")
    owner.turn(2)
    owner.add("behind")
    owner.core.call("pause_generation", ["wait", True])
    names = [f"late{i}" for i in range(4)]
    for name in names:
        owner.add(name, max_tokens=3)
    assert owner.call("is_paused") is True
    owner.finish("before")
    assert owner.ended("behind") is None, "it had not begun"
    owner.call("resume_generation")
    owner.call("resume_generation")
    assert owner.call("is_paused") is False
    owner.finish("behind", *names)
    assert owner.order == ["before", "behind", *names]


def test_contract_C21_resuming_too_early_is_told_to_whoever_waits_for_the_pause() -> None:
    owner = Owner()
    owner.add("a")
    owner.turn(2)
    paused = owner.core.call("pause_generation", ["wait", True])
    owner.call("resume_generation")
    owner.until(paused.done)
    with pytest.raises(DiptychError, match="resumed before"):
        paused.result()
    owner.finish("a")


@pytest.mark.parametrize(("first", "second"), [*itertools.product(MODES, MODES)])
def test_contract_B14_one_pause_replaces_another_and_loses_nothing(
    first: PauseMode, second: PauseMode, expected: list[int]
) -> None:
    owner = Owner(max_num_seqs=1)
    owner.add("running")
    owner.turn(4)
    owner.add("fresh")
    owner.core.call("pause_generation", [first, False])
    owner.add("late1")
    owner.call("pause_generation", second, False)
    owner.add("late2")
    aborted = {"abort": {"running", "fresh", "late1"}, "wait": set(), "keep": set()}
    gone = set(aborted[second]) | ({"running", "fresh"} if first == "abort" else set())
    owner.call("resume_generation")
    owner.finish(*owner.outputs)
    for name in owner.outputs:
        wanted = FinishReason.ABORT if name in gone else FinishReason.LENGTH
        assert owner.ended(name) is wanted, name
        if name not in gone:
            assert owner.tokens(name) == expected
    assert [n for n in owner.order if n not in gone] == [
        n for n in ("running", "fresh", "late1", "late2") if n not in gone
    ]
    assert owner.all_blocks_free


@pytest.mark.parametrize(
    ("mode", "state", "frozen"),
    [
        ("abort", PauseState.PAUSED_NEW, False),
        ("wait", PauseState.PAUSED_NEW, False),
        ("keep", PauseState.PAUSED_ALL, True),
    ],
)
def test_contract_B14_the_state_of_each_mode(
    mode: PauseMode, state: PauseState, frozen: bool
) -> None:
    gate, waiting = PauseGate(), make_queue("fcfs", FairShare(0.0))
    assert not gate.paused
    gate.close(mode, waiting)
    assert (gate.state, gate.paused, gate.frozen) == (state, True, frozen)
    gate.open(waiting)
    assert (gate.paused, gate.frozen, gate.parked) == (False, False, deque())


def test_contract_B14_a_preempted_request_still_drains() -> None:
    owner = Owner(num_blocks=6)
    for name in ("a", "b", "c"):
        owner.add(name, [ord(name) % 64] * 17)
    owner.until(lambda: owner.core.scheduler.stats.num_preemptions)
    preempted = [r.request_id for r in owner.core.scheduler.waiting]
    assert preempted
    owner.call("pause_generation", "wait", True)
    assert all(owner.ended(name) is FinishReason.LENGTH for name in ("a", "b", "c"))
    assert owner.all_blocks_free


def test_contract_B14_other_calls_are_answered_while_a_pause_is_under_way() -> None:
    owner = Owner()
    owner.add("a")
    owner.turn(2)
    paused = owner.core.call("pause_generation", ["wait", True])
    assert owner.core.call("stats", []).num_running == 1
    assert owner.core.call("is_sleeping", []) is True
    assert not paused.done()
    owner.until(paused.done)


def test_contract_C07_a_parked_request_can_be_aborted() -> None:
    owner = Owner()
    owner.call("pause_generation", "keep", True)
    owner.add("parked")
    owner.core.abort(["parked", "parked", "unknown"])
    owner.turn()
    assert owner.ended("parked") is FinishReason.ABORT
    assert owner.core.scheduler.snapshot().num_waiting == 0
