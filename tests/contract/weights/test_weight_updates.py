"""New weights for a running engine: all of them or an engine that says so, and never a mixture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.core import CLIENT, core_request, generate, make_core, run, step, tokens
from model_kit.checkpoints import random_tensors, save_adapter, save_model
from torch import Tensor
from waits import PATIENCE_S

from diptych_engine.control.core import EngineCore
from diptych_engine.weights.trainer import WeightSender, describe
from diptych_protocol import (
    Array,
    DiptychError,
    InvalidRequestError,
    LoRARequest,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
LENGTH = 12
OLD, NEW = 0, 1
"""Seeds of checkpoints."""
NORM, SIZE = "model.norm.weight", 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for seed in (OLD, NEW):
        save_model(root / str(seed), random_tensors(seed))
    return root


MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def engine(folder: Path) -> MakeCore:
    def make(seed: int = OLD, **options: Any) -> EngineCore:
        return make_core(str(folder / str(seed)), **{"block_size": 4, **options})

    return make


@pytest.fixture(scope="module")
def expected(engine: MakeCore) -> list[list[int]]:
    """Greedy tokens with the old and with the new weights."""
    made = [generate(engine(seed), PROMPT, max_tokens=LENGTH) for seed in (OLD, NEW)]
    assert made[0] != made[1]
    return made


def as_array(tensor: Tensor) -> Array:
    tensor = tensor.contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def update(tensors: dict[str, Tensor]) -> WeightTransferUpdateRequest:
    return WeightTransferUpdateRequest(list(tensors), [as_array(t) for t in tensors.values()])


def pause(core: EngineCore, mode: str = "wait") -> None:
    """The caches are left as they are: to forget them is part of an update."""
    answer = core.call("pause_generation", [mode, False])
    core.deferred.settle()
    assert answer.done()


def replace(core: EngineCore, tensors: dict[str, Tensor], **options: Any) -> None:
    """A whole update, in two parts."""
    names = list(tensors)
    core.call("start_weight_update", list(options.values()))
    for part in (names[:5], names[5:]):
        core.call("update_weights", [update({name: tensors[name] for name in part})])
    core.call("finish_weight_update", [])


def test_contract_C26_the_engine_answers_with_the_new_weights(
    engine: MakeCore, expected: list[list[int]]
) -> None:
    """The prompt's blocks of the old weights are in the prefix cache, and are not used."""
    core = engine()
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[OLD]
    pause(core)
    replace(core, random_tensors(NEW))
    core.call("resume_generation", [])
    [outputs] = run(core, core_request("r", PROMPT, max_tokens=LENGTH)).values()
    assert tokens(outputs) == expected[NEW]
    assert outputs[0].num_cached_tokens == 0


def test_contract_C26_some_tensors_may_be_replaced_in_half_precision(
    engine: MakeCore, tmp_path: Path
) -> None:
    names = ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"]
    new = {name: random_tensors(NEW)[name].bfloat16() for name in names}
    mixed = random_tensors(OLD) | {name: tensor.float() for name, tensor in new.items()}
    fresh = make_core(save_model(tmp_path, mixed), block_size=4)
    core = engine()
    pause(core)
    core.call("start_weight_update", [])
    core.call("update_weights", [update(new)])
    core.call("finish_weight_update", [])
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=LENGTH) == generate(fresh, PROMPT, max_tokens=LENGTH)


def test_contract_C26_tensors_may_come_as_the_model_lays_them_out(
    engine: MakeCore, expected: list[list[int]]
) -> None:
    laid_out = engine(NEW).runner.collective_rpc("_weight_names", (False,))[0]
    runner: Any = engine(NEW).runner
    tensors = dict(runner.model.named_parameters())
    assert list(tensors) == laid_out
    core = engine()
    pause(core)
    replace(core, tensors, is_checkpoint_format=False)
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[NEW]


def test_contract_C26_a_kept_request_changes_weights_between_two_tokens(
    engine: MakeCore, expected: list[list[int]]
) -> None:
    """Its first tokens are the old model's; what follows, the new model makes of all of them."""
    core = engine()
    core.add(core_request("r", PROMPT, max_tokens=LENGTH), CLIENT)
    made = [output for _ in range(5) for output in step(core)]
    pause(core, "keep")
    replace(core, random_tensors(NEW))
    assert step(core) == []
    core.call("resume_generation", [])
    while not made[-1].finished:
        made += step(core)
    old = tokens(made)[:5]
    assert old == expected[OLD][:5]
    fresh = generate(engine(NEW), PROMPT + old, max_tokens=LENGTH - 5)
    assert tokens(made)[5:] == fresh


def test_contract_C26_nothing_is_generated_in_between(engine: MakeCore) -> None:
    core = engine()
    pause(core, "keep")
    core.call("start_weight_update", [])
    core.add(core_request("waits", PROMPT, max_tokens=2), CLIENT)
    with pytest.raises(InvalidRequestError, match="under way"):
        core.call("resume_generation", [])
    assert step(core) == []
    core.call("finish_weight_update", [])
    core.call("resume_generation", [])
    assert tokens(step(core) + step(core)) != []


def test_contract_C26_an_update_stands_between_start_and_finish(engine: MakeCore) -> None:
    core = engine()
    some = update({"model.norm.weight": torch.ones(32)})
    with pytest.raises(InvalidRequestError, match="pause generation first"):
        core.call("start_weight_update", [])
    for call, args in (("update_weights", [some]), ("finish_weight_update", [])):
        with pytest.raises(InvalidRequestError, match="start one first"):
            core.call(call, args)
    pause(core)
    core.call("start_weight_update", [])
    with pytest.raises(InvalidRequestError, match="already"):
        core.call("start_weight_update", [])
    core.call("finish_weight_update", [])
    with pytest.raises(InvalidRequestError, match="start one first"):
        core.call("finish_weight_update", [])


GOOD = "model.norm.weight"
BAD: dict[str, tuple[WeightTransferUpdateRequest, str]] = {
    "unknown name": (update({GOOD: torch.ones(32), "model.nose": torch.ones(3)}), "model.nose"),
    "shape": (update({GOOD: torch.ones(31)}), r"shape \[31\], not \[32\]"),
    "type": (update({GOOD: torch.ones(32, dtype=torch.int64)}), "int64, not floats"),
    "too few arrays": (
        WeightTransferUpdateRequest([GOOD, GOOD], [as_array(torch.ones(32))]), "2 names, 1 dtypes",
    ),
    "no way": (
        WeightTransferUpdateRequest([GOOD], [], {"dtypes": ["float32"], "shapes": [[32]]}),
        "no trainer",
    ),
    "no headers": (WeightTransferUpdateRequest([GOOD]), "update_info: "),
    "negative shape": (
        WeightTransferUpdateRequest([GOOD], [], {"dtypes": ["float32"], "shapes": [[-32]]}),
        "no float32 tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_contract_C26_after_a_failed_update_the_engine_says_so(
    engine: MakeCore, expected: list[list[int]], name: str
) -> None:
    request, message = BAD[name]
    core = engine()
    pause(core)
    core.call("start_weight_update", [])
    with pytest.raises(InvalidRequestError, match=message):
        core.call("update_weights", [request])
    for call, args in (
        ("update_weights", [update({GOOD: torch.ones(32)})]),
        ("finish_weight_update", []),
        ("resume_generation", []),
    ):
        with pytest.raises(InvalidRequestError, match="the last weight update failed"):
            core.call(call, args)
    core.add(core_request("r", PROMPT, max_tokens=2), CLIENT)
    [refused] = step(core)
    assert "the last weight update failed" in (refused.error or "")
    core.call("start_weight_update", [])  # nothing was changed: a new one need not be complete
    core.call("finish_weight_update", [])
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[OLD]


def fail_midway(core: EngineCore) -> None:
    pause(core)
    core.call("start_weight_update", [])
    core.call("update_weights", [update({GOOD: 3.0 * torch.ones(32)})])
    with pytest.raises(InvalidRequestError, match="no tensor"):
        core.call("update_weights", [update({"model.nose": torch.ones(3)})])


def test_contract_C26_torn_weights_are_whole_again_only_when_all_came(
    engine: MakeCore, expected: list[list[int]]
) -> None:
    core = engine()
    fail_midway(core)
    tensors = random_tensors(NEW)
    core.call("start_weight_update", [])
    core.call("update_weights", [update({n: t for n, t in tensors.items() if n != GOOD})])
    with pytest.raises(InvalidRequestError, match=f"{GOOD} was not"):
        core.call("finish_weight_update", [])
    with pytest.raises(InvalidRequestError, match="under way"):
        core.call("resume_generation", [])
    core.call("update_weights", [update({GOOD: tensors[GOOD]})])
    core.call("finish_weight_update", [])
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[NEW]


def reload(core: EngineCore) -> None:
    core.call("reload_weights", [])
    core.call("resume_generation", [])


def sleep_deeply(core: EngineCore) -> None:
    core.call("sleep", [2])
    core.deferred.settle()
    core.call("wake_up", [])


@pytest.mark.parametrize("mend", [reload, sleep_deeply])
def test_contract_C26_torn_weights_can_be_had_from_the_source_again(
    engine: MakeCore, expected: list[list[int]], mend: Callable[[EngineCore], None]
) -> None:
    core = engine()
    fail_midway(core)
    mend(core)
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[OLD]


def test_contract_C26_a_source_that_is_read_in_part_is_not_used(
    expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(load: Any) -> None:
        next(iter(load._slots.values())).target.zero_()
        raise OSError("the disk is gone")

    core = make_core(str(save_model(tmp_path, random_tensors(OLD))), block_size=4)
    pause(core)
    with monkeypatch.context() as patch:
        patch.setattr("diptych_engine.models.loader._Load.run", breaks_off)
        with pytest.raises(OSError, match="the disk"):
            core.call("reload_weights", [])
    with pytest.raises(InvalidRequestError, match="the last weight update failed"):
        core.call("resume_generation", [])
    reload(core)
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[OLD]


def test_contract_C26_a_source_that_does_not_fit_changes_nothing(
    expected: list[list[int]], tmp_path: Path
) -> None:
    save_model(tmp_path, random_tensors(OLD))
    core = make_core(str(tmp_path), block_size=4)
    (tmp_path / "model.safetensors").unlink()  # what was mapped stays
    save_model(tmp_path, {**random_tensors(NEW), "model.norm.weight": torch.ones(7)})
    pause(core)
    with pytest.raises(InvalidRequestError, match="shape"):
        core.call("reload_weights", [])
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[OLD]


def test_contract_C26_adapters_stay_on_the_new_weights(
    engine: MakeCore, folder: Path, tmp_path: Path
) -> None:
    adapter = LoRARequest("a", 1, save_adapter(tmp_path, 1))
    core = engine()
    old = generate(core, PROMPT, max_tokens=LENGTH, lora_request=adapter)
    pause(core)
    replace(core, random_tensors(NEW))
    core.call("resume_generation", [])
    new = generate(core, PROMPT, max_tokens=LENGTH, lora_request=adapter)
    assert new == generate(engine(NEW), PROMPT, max_tokens=LENGTH, lora_request=adapter) != old


def test_contract_C26_weights_that_are_asleep_are_not_replaced(engine: MakeCore) -> None:
    core = engine()
    core.call("sleep", [1])
    core.deferred.settle()
    with pytest.raises(InvalidRequestError, match="asleep"):
        core.call("start_weight_update", [])


# --- a trainer's process group --------------------------------------------------------------------


@pytest.fixture
def sender() -> WeightSender:
    return WeightSender("127.0.0.1", num_workers=1, timeout_s=PATIENCE_S)


def joined(core: EngineCore, sender: WeightSender) -> None:
    joining = threading.Thread(target=sender.join)
    joining.start()
    core.call("init_weight_transfer_engine", [sender.address()])
    joining.join()


def test_contract_C26_a_group_carries_what_messages_cannot(
    engine: MakeCore, expected: list[list[int]], sender: WeightSender
) -> None:
    core = engine()
    joined(core, sender)
    pause(core)
    for seed in (NEW, OLD, NEW):
        tensors = random_tensors(seed)
        core.call("start_weight_update", [])
        sending = threading.Thread(target=sender.send, args=(tensors,))
        sending.start()
        core.call("update_weights", [describe(tensors)])
        sending.join()
        core.call("finish_weight_update", [])
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[NEW]


def test_contract_C26_replicas_have_ranks_of_their_own(
    engine: MakeCore, expected: list[list[int]]
) -> None:
    """One trainer for both replicas of an engine, which get the same call."""
    replicas = [engine(data_parallel_size=2, data_parallel_rank=rank) for rank in (0, 1)]
    sender = WeightSender("127.0.0.1", num_workers=2, timeout_s=PATIENCE_S)
    tensors = random_tensors(NEW)

    def at_once(*calls: Callable[[], object]) -> None:
        with ThreadPoolExecutor(len(calls)) as pool:
            for done in [pool.submit(call) for call in calls]:
                done.result()

    def call(method: str, *args: object) -> list[Callable[[], object]]:
        return [partial(core.call, method, list(args)) for core in replicas]

    at_once(sender.join, *call("init_weight_transfer_engine", sender.address()))
    for core in replicas:
        pause(core)
        core.call("start_weight_update", [])
    at_once(partial(sender.send, tensors), *call("update_weights", describe(tensors)))
    for core in replicas:
        core.call("finish_weight_update", [])
        core.call("resume_generation", [])
        assert generate(core, PROMPT, max_tokens=LENGTH) == expected[NEW]


@pytest.mark.parametrize(
    ("name", "length", "dtype"),
    [
        (NORM, SIZE // 2, torch.float32),
        (NORM, SIZE * 2, torch.float32),
        (NORM, SIZE, torch.float64),
        (NORM, SIZE, torch.int32),
        ("model.layers.0.input_layernorm.weight", SIZE, torch.float32),
    ],
)
def test_contract_C26_a_trainer_that_sends_something_else_fails_the_update(
    engine: MakeCore, sender: WeightSender, name: str, length: int, dtype: torch.dtype
) -> None:
    """Nothing is filled by half or with what was meant for another place, and the engine lives."""
    core = engine()
    joined(core, sender)
    pause(core)
    core.call("start_weight_update", [])
    others = {name: torch.ones(length, dtype=dtype)}
    refusal = rf"sends {name} .*, where {NORM} float32 \[{SIZE}\] was announced"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(sender.send, others)
        with pytest.raises(DiptychError, match=refusal):
            core.call("update_weights", [describe({NORM: torch.ones(SIZE)})])
    core.call("reload_weights", [])
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=1)


@pytest.mark.parametrize("gone", [False, True])
def test_contract_C26_a_trainer_that_says_nothing_fails_the_update(
    engine: MakeCore, expected: list[list[int]], gone: bool
) -> None:
    core = engine()
    sender = WeightSender("127.0.0.1", num_workers=1, timeout_s=PATIENCE_S if gone else 1.0)
    joined(core, sender)
    if gone:
        del sender  # which ends its connections
    pause(core)
    core.call("start_weight_update", [])
    with pytest.raises(DiptychError, match=r"did not arrive: \w[^\n]*$"):
        core.call("update_weights", [describe(random_tensors(NEW))])
    core.call("start_weight_update", [])
    with pytest.raises(InvalidRequestError, match=r"all tensors must be replaced"):
        core.call("finish_weight_update", [])
    core.call("reload_weights", [])
    core.call("resume_generation", [])
    assert generate(core, PROMPT, max_tokens=LENGTH) == expected[OLD]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, DiptychError, "no trainer at 127.0.0.1:1"),
        ({"master_address": "no.such.host.invalid"}, DiptychError, "no trainer at"),
        ({"master_port": 0}, InvalidRequestError, "must be a port"),
        ({"rank_offset": 2}, InvalidRequestError, "rank_offset"),
        ({"world_size": 1 << 31}, InvalidRequestError, "world_size"),
        ({"master_address": "a" * 64}, DiptychError, "no trainer at"),
        ({"timeout_s": 1e9}, InvalidRequestError, "timeout_s"),
        ({"world_size": "two"}, InvalidRequestError, "Expected `int`"),
        ({"unknown": 1}, InvalidRequestError, "unknown"),
    ],
)
def test_contract_C26_a_trainer_that_is_not_there_is_an_error(
    engine: MakeCore, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "timeout_s": 0.5}
    core = engine()
    with pytest.raises(error, match=message):
        core.call("init_weight_transfer_engine", [WeightTransferInitRequest(info | changes)])
    assert generate(core, PROMPT, max_tokens=1)


def test_contract_C26_requests_that_run_do_not_wait_for_a_trainer(engine: MakeCore) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "timeout_s": 0.5}
    core = engine()
    join = partial(core.call, "init_weight_transfer_engine", [WeightTransferInitRequest(info)])
    core.add(core_request("r", PROMPT, max_tokens=2), CLIENT)
    with pytest.raises(InvalidRequestError, match="pause generation first"):
        join()
    pause(core, "keep")
    with pytest.raises(DiptychError, match="no trainer"):
        join()
