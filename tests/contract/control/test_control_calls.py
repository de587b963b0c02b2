"""Resets, profiles, and how a core treats calls while it works and while it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_kit.control import LONG, Owner, shared_core, undisturbed
from engine_kit.core import generate

from diptych_engine.control.utilities import Deferred, call_utility
from diptych_protocol import DiptychError, FinishReason, InvalidRequestError, PauseMode


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return undisturbed()


def test_contract_C15_false_while_running_true_when_idle() -> None:
    owner = Owner()
    owner.add("a", list(range(40)))
    owner.turn(3)
    assert owner.call("reset_prefix_cache") is False
    owner.finish("a")
    assert owner.call("reset_prefix_cache") is True
    assert owner.call("reset_prefix_cache", False, True) is True, "no connector is a success"
    owner.add("again", list(range(40)))
    owner.finish("again")
    assert owner.outputs["again"][-1].num_cached_tokens == 0


@pytest.mark.parametrize("mid_step", [False, True])
def test_contract_C15_a_forced_reset_changes_no_token(mid_step: bool, expected: list[int]) -> None:
    owner = Owner()
    owner.add("a")
    owner.add("b", list(range(50)), temperature=0.9, seed=3)
    owner.turn(8)
    for _ in range(3):
        begun = owner.core.start_step() if mid_step else None
        assert owner.core.call("reset_prefix_cache", [True]) is True
        if begun is not None:
            owner.core.finish_step(*begun)
            assert not owner.core.take_outputs(), "what was in flight is dropped"
        owner.turn(5)
    owner.finish("a", "b")
    assert owner.tokens("a") == expected
    assert owner.tokens("b") == generate(
        owner.core, list(range(50)), temperature=0.9, seed=3, **LONG
    )
    assert owner.all_blocks_free


@pytest.mark.parametrize("method", ["reset_mm_cache", "reset_encoder_cache"])
def test_contract_C13_C14_an_engine_without_such_a_cache_says_so_and_succeeds(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert "no multimodal model" in shared_core().call(method, [])
    assert method in caplog.text


def test_contract_C12_a_profile_is_written_and_names_the_model_run(tmp_path: Path) -> None:
    owner = Owner(profile_dir=str(tmp_path / "traces"))
    assert owner.call("stop_profile") == [], "harmless without one"
    owner.call("start_profile")
    with pytest.raises(InvalidRequestError, match="running already"):
        owner.call("start_profile")
    owner.add("a", max_tokens=3)
    owner.finish("a")
    [file] = owner.call("stop_profile")
    names = {event.get("name") for event in json.loads(Path(file).read_text())["traceEvents"]}
    assert "execute_model" in names
    assert owner.call("stop_profile") == []


def test_contract_C12_without_a_directory_no_profile_starts() -> None:
    with pytest.raises(InvalidRequestError, match="profile_dir"):
        shared_core().call("start_profile", [])


@pytest.mark.parametrize(
    ("method", "args", "complaint"),
    [
        ("sleep", [3], "level"), ("sleep", ["1"], "level"), ("sleep", [1, "nap"], "mode"),
        ("wake_up", [["coffee"]], "coffee"), ("wake_up", ["weights"], "tags"),
        ("pause_generation", ["stop"], "mode"), ("pause_generation", ["abort", True, 1], "many"),
    ],
)  # fmt: skip
def test_contract_B15_arguments_are_checked_against_the_annotations(
    method: str, args: list[Any], complaint: str
) -> None:
    core = shared_core()
    with pytest.raises(InvalidRequestError, match=complaint):
        core.call(method, args)
    assert core.call("is_sleeping", []) is False


def test_contract_B15_an_unknown_name_fails_only_that_call() -> None:
    with pytest.raises(InvalidRequestError, match="no utility method"):
        shared_core().call("__init__", [])
    assert shared_core().call("describe", [])["num_blocks"] == 64


def test_contract_B15_struct_arguments_are_converted() -> None:
    def takes(number: int, mode: PauseMode = "abort", *rest: bool) -> tuple[Any, ...]:
        return number, mode, *rest

    assert call_utility(takes, [1, "keep", True, False]) == (1, "keep", True, False)
    for wrong in ([], [1.5], [1, "other"], [1, "keep", 3]):
        with pytest.raises(InvalidRequestError):
            call_utility(takes, wrong)


def test_contract_B15_a_deferred_answer_comes_when_it_can_or_with_the_error() -> None:
    deferred, ready = Deferred(), [False]
    fine = deferred.when(lambda: ready[0], lambda: 7)
    bad = deferred.when(lambda: ready[0], lambda: 1 // 0)
    never = deferred.when(lambda: 1 // 0 == 0, lambda: 7)
    dropped = deferred.when(lambda: ready[0], lambda: ready.append(True))
    deferred.settle()
    assert (fine.done(), bad.done(), never.done()) == (False, False, True)
    dropped.cancel()
    ready[0] = True
    deferred.settle()
    assert fine.result() == 7
    assert isinstance(bad.exception(), ZeroDivisionError)
    assert ready == [True], "what nobody waits for is not done"


def test_contract_B16_a_leaving_core_aborts_what_comes_and_answers_no_call() -> None:
    owner = Owner()
    owner.core.leaving = True
    owner.add("late")
    owner.turn()
    assert owner.ended("late") is FinishReason.ABORT
    with pytest.raises(DiptychError, match="Server shutting down"):
        owner.call("stats")


def test_contract_B07_an_abort_during_a_step_silences_the_request() -> None:
    owner = Owner()
    owner.add("a")
    owner.turn(3)
    before = len(owner.outputs["a"])
    begun = owner.core.start_step()
    owner.core.abort(["a", "a"])
    owner.core.finish_step(*begun)
    owner.turn()
    assert [o.finish_reason for o in owner.outputs["a"][before:]] == [FinishReason.ABORT]
    assert owner.outputs["a"][-1].new_token_ids == []
    assert owner.all_blocks_free
