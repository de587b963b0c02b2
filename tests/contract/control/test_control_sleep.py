"""An EngineCore that gives its memory back and takes it again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from engine_kit.control import LONG, Owner, undisturbed
from engine_kit.core import DUMMY, generate
from model_kit.checkpoints import random_tensors, save_model

from diptych_protocol import InvalidRequestError


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return undisturbed()


OUT_1, OUT_2 = (True, True, 1), (True, True, 2)
PAUSED, AWAKE = (True, True, 0), (False, False, 0)


@pytest.mark.parametrize(
    ("level", "steps"),
    [
        (0, [(None, AWAKE)]),
        (0, [(["scheduling"], AWAKE)]),
        (1, [(None, AWAKE)]),
        (1, [(["weights"], OUT_1), (["kv_cache"], AWAKE)]),
        (1, [(["kv_cache"], OUT_1), (["weights"], AWAKE)]),
        (1, [(["scheduling"], OUT_1), (["weights", "kv_cache"], AWAKE)]),
        (2, [(["kv_cache"], OUT_2), (["kv_cache"], OUT_2), (["weights"], AWAKE)]),
        (2, [(["weights"], OUT_1), ([], OUT_1), (["kv_cache", "scheduling"], AWAKE)]),
    ],
)
def test_contract_C18_is_sleeping_until_everything_is_back(
    level: int, steps: list[tuple[list[str] | None, Any]], expected: list[int]
) -> None:
    """C16 and C17 too: whatever the level and the way back, the tokens are those of before."""
    owner = Owner()

    def state() -> tuple[bool, bool, int]:
        sleeping, paused = owner.call("is_sleeping"), owner.call("is_paused")
        return sleeping, paused, owner.core.stats().sleep_level

    assert state() == AWAKE
    owner.call("sleep", level, "abort")
    assert state() == (True, True, level)
    owner.add("while asleep")
    for tags, wanted in steps:
        assert owner.outputs["while asleep"] == []
        owner.call("wake_up", tags)
        assert state() == wanted
        owner.turn(2)
    owner.finish("while asleep")
    assert owner.tokens("while asleep") == expected
    assert owner.all_blocks_free


@pytest.mark.parametrize("level", [0, 1, 2])
def test_contract_C16_kept_requests_go_on_after_the_sleep(level: int, expected: list[int]) -> None:
    owner = Owner()
    owner.add("a")
    owner.turn(9)
    owner.call("sleep", level, "keep")
    owner.call("wake_up")
    owner.finish("a")
    assert owner.tokens("a") == expected


def test_contract_C16_sleep_goes_deeper_but_not_shallower(expected: list[int]) -> None:
    owner = Owner()
    for level, is_level in ((1, 1), (2, 2), (1, 2), (0, 2)):
        owner.call("sleep", level)
        assert owner.core.stats().sleep_level == is_level
    owner.call("wake_up")
    assert generate(owner.core, [3, 1, 4, 1, 5], **LONG) == expected


def test_contract_C16_level_1_keeps_weights_that_are_no_longer_those_of_the_source() -> None:
    owner = Owner()
    untouched = generate(owner.core, [3, 1, 4, 1, 5], **LONG)
    for slot in owner.core.runner.model.slots.values():  # type: ignore[attr-defined]
        slot.target.mul_(-0.5)
    changed = generate(owner.core, [3, 1, 4, 1, 6], **LONG)
    owner.call("sleep", 1)
    owner.call("wake_up")
    assert generate(owner.core, [3, 1, 4, 1, 6], **LONG) == changed
    owner.call("sleep", 2)
    owner.call("wake_up")
    assert generate(owner.core, [3, 1, 4, 1, 5], **LONG) == untouched


def test_contract_C17_an_engine_without_its_memory_is_not_resumed() -> None:
    owner = Owner()
    owner.call("sleep", 1)
    with pytest.raises(InvalidRequestError, match="asleep"):
        owner.call("resume_generation")
    owner.call("wake_up")
    owner.call("wake_up")
    assert owner.call("is_sleeping") is False


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_contract_C17_what_wakes_up_is_what_the_tags_say(tags: list[str]) -> None:
    owner = Owner()
    owner.call("sleep", 1)
    for tag in tags[:-1]:
        owner.call("wake_up", [tag])
        assert owner.call("is_sleeping") is True, "partly awake is asleep"
    owner.call("wake_up", tags[-1:])
    assert owner.call("is_sleeping") is False


def test_a_model_that_is_put_aside_leaves_nothing_of_its_weights() -> None:
    owner = Owner(model=DUMMY)
    storages = [
        slot.target.untyped_storage()
        for slot in owner.core.runner.model.slots.values()  # type: ignore[attr-defined]
    ]
    owner.call("sleep", 1)
    assert all(storage.nbytes() == 0 for storage in storages)
    assert not owner.core.runner.kv_cache.any()  # type: ignore[attr-defined]
    owner.call("wake_up")
    assert all(storage.nbytes() > 0 for storage in storages)


def test_contract_C17_a_wake_up_that_fails_leaves_the_engine_asleep_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    owner = Owner(model=save_model(tmp_path / "model", random_tensors(1)))
    before = generate(owner.core, [3, 1, 4], **LONG)
    owner.call("sleep", 2)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequestError, match="model"):
        owner.call("wake_up")
    assert owner.core.stats().sleep_level == 2
    owner.add("queued", [3, 1, 4])
    owner.turn(3)
    assert owner.outputs["queued"] == []
    (tmp_path / "elsewhere").rename(tmp_path / "model")
    owner.call("wake_up")
    owner.finish("queued")
    assert owner.tokens("queued") == before


def test_contract_C16_without_room_for_the_weights_the_engine_stays_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    owner = Owner()
    with monkeypatch.context() as nowhere:
        nowhere.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with pytest.raises(OSError, match="nowhere"):
            owner.call("sleep", 1)
    assert owner.core.stats().sleep_level == 0
    owner.call("resume_generation")
    assert generate(owner.core, [3, 1, 4, 1, 5], **LONG) == expected


def test_contract_C16_every_tensor_parallel_rank_sleeps_and_wakes(expected: list[int]) -> None:
    owner = Owner(tensor_parallel_size=2)
    try:
        for level in (1, 2):
            owner.call("sleep", level)
            owner.call("wake_up")
            assert generate(owner.core, [3, 1, 4, 1, 5], **LONG) == expected
    finally:
        owner.core.close()
