"""Adapters and new weights where several processes share every layer: each takes its part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.core import core_request, generate, make_core, run, tokens
from model_kit.checkpoints import random_tensors, save_adapter, save_model
from waits import PATIENCE_S

from diptych_engine.control.core import EngineCore
from diptych_engine.weights.trainer import WeightSender, describe
from diptych_protocol import Array, InvalidRequestError, LoRARequest, WeightTransferUpdateRequest

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `0` and `1`, adapters `a1` and `a2`."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        save_model(root / str(seed), random_tensors(seed))
    for number in (1, 2):
        save_adapter(root / f"a{number}", number)
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> EngineCore:
    return make_core(str(folder / "0"), block_size=4)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[EngineCore]:
    core = make_core(str(folder / "0"), block_size=4, max_loras=1, tensor_parallel_size=2)
    yield core
    core.close()


def answers(core: EngineCore, folder: Path) -> dict[str, list[int]]:
    """Requests with two adapters and with none, in the same steps."""
    adapters: list[LoRARequest | None] = [None]
    adapters += [LoRARequest(f"a{i}", i, str(folder / f"a{i}")) for i in (1, 2)]
    requests = [
        core_request(f"{i}-{repeat}", PROMPT, max_tokens=LENGTH, lora_request=adapter)
        for i, adapter in enumerate(adapters)
        for repeat in range(2)
    ]
    made = run(core, *requests)
    assert all(outputs[-1].error is None for outputs in made.values())
    return {name: tokens(outputs) for name, outputs in made.items()}


def test_contract_C19_every_rank_adds_its_share_of_an_adapter(
    alone: EngineCore, pair: EngineCore, folder: Path
) -> None:
    made = answers(pair, folder)
    assert made == answers(alone, folder)
    assert len({tuple(made) for made in made.values()}) == 3


def test_contract_C19_an_adapter_that_is_no_good_fails_on_no_rank(
    alone: EngineCore, pair: EngineCore, folder: Path
) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        pair.call("add_lora", [LoRARequest("a", 9, "/nowhere")])
    assert answers(pair, folder) == answers(alone, folder)


def replace(core: EngineCore, request: WeightTransferUpdateRequest) -> None:
    paused = core.call("pause_generation", ["wait"])
    core.deferred.settle()
    assert paused.done()
    core.call("start_weight_update", [])
    core.call("update_weights", [request])
    core.call("finish_weight_update", [])
    core.call("resume_generation", [])


def test_contract_C26_every_rank_takes_its_share_of_new_weights(
    pair: EngineCore, folder: Path
) -> None:
    """Once from the trainer's group, and once from messages."""
    expected = [
        generate(make_core(str(folder / str(seed))), PROMPT, max_tokens=LENGTH) for seed in (0, 1)
    ]
    sender = WeightSender("127.0.0.1", num_workers=2, timeout_s=PATIENCE_S)
    tensors = random_tensors(1)

    def train() -> None:
        sender.join()
        sender.send(tensors)

    trainer = threading.Thread(target=train)
    trainer.start()
    pair.call("init_weight_transfer_engine", [sender.address()])
    replace(pair, describe(tensors))
    trainer.join()
    assert generate(pair, PROMPT, max_tokens=LENGTH) == expected[1]

    tensors = random_tensors(0)
    arrays = [
        Array("float32", tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for t in tensors.values()
    ]
    replace(pair, WeightTransferUpdateRequest(list(tensors), arrays))
    assert generate(pair, PROMPT, max_tokens=LENGTH) == expected[0]


def test_contract_C26_a_layout_of_its_own_cannot_be_replaced(pair: EngineCore) -> None:
    paused: Any = pair.call("pause_generation", ["wait"])
    pair.deferred.settle()
    assert paused.done()
    with pytest.raises(InvalidRequestError, match="checkpoint format"):
        pair.call("start_weight_update", [False])
    pair.call("resume_generation", [])
