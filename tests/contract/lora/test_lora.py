"""Adapters: the output is that of merged weights, whoever shares the batch, blocks and places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.core import CLIENT, core_request, generate, make_core, run, step, tokens
from model_kit.checkpoints import MODULES, merged, random_tensors, save_adapter, save_model
from safetensors.torch import load_file, save_file

from diptych_engine import LLMEngine
from diptych_engine.control.core import EngineCore
from diptych_engine.scheduling.adapter import Adapter, cache_identity
from diptych_protocol import (
    EngineConfig,
    InvalidRequestError,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    UtilityError,
)

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
NUM_ADAPTERS = 4
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters `1`…`4`, and the model with each of them merged in."""
    root = tmp_path_factory.mktemp("lora")
    base = random_tensors(0)
    save_model(root / "base", base)
    for number in range(1, NUM_ADAPTERS + 1):
        modules = list(MODULES)[: 2 + number]
        adapter = save_adapter(root / str(number), number, rank=1 + number, modules=modules)
        save_model(root / f"merged-{number}", merged(base, adapter))
    return root


Options = Any
MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def engine(folder: Path) -> MakeCore:
    def make(model: str = "base", **options: Options) -> EngineCore:
        return make_core(str(folder / model), **{"block_size": 4, **options})

    return make


@pytest.fixture(scope="module")
def expected(engine: MakeCore) -> list[list[int]]:
    """Greedy tokens of the base model and of each merged one."""
    names = ["base", *(f"merged-{number}" for number in range(1, NUM_ADAPTERS + 1))]
    return [generate(engine(name), PROMPT, max_tokens=LENGTH) for name in names]


@pytest.fixture
def adapter(folder: Path) -> Callable[[int], LoRARequest | None]:
    """The request for adapter 1…4; 0 is none."""

    def make(number: int) -> LoRARequest | None:
        return LoRARequest(f"a{number}", number, str(folder / str(number))) if number else None

    return make


def ask(core: EngineCore, request: LoRARequest | None, **fields: Any) -> list[int]:
    return generate(core, PROMPT, max_tokens=LENGTH, lora_request=request, **fields)


def test_the_models_of_these_tests_differ(expected: list[list[int]]) -> None:
    assert len({tuple(made) for made in expected}) == len(expected)


@pytest.mark.parametrize("number", range(1, NUM_ADAPTERS + 1))
def test_contract_C19_an_adapter_answers_like_merged_weights(
    engine: MakeCore, adapter: Any, number: int, expected: list[list[int]]
) -> None:
    core = engine()
    assert ask(core, adapter(number)) == expected[number]
    assert ask(core, None) == expected[0]


def test_contract_C19_logprobs_equal_those_of_merged_weights(
    engine: MakeCore, adapter: Any
) -> None:
    def logprobs(core: EngineCore, request: LoRARequest | None) -> torch.Tensor:
        [outputs] = run(
            core, core_request("r", PROMPT, max_tokens=4, logprobs=20, lora_request=request)
        ).values()
        assert outputs[-1].error is None
        rows = [out.new_logprobs for out in outputs]
        return torch.tensor([row.logprobs[0] for row in rows if row is not None])

    own, other = logprobs(engine(), adapter(3)), logprobs(engine("merged-3"), None)
    torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
    assert own.std() > 0.1  # else the tolerance would prove nothing


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_num_batched_tokens": 8}, id="chunked prefill"),
        pytest.param({"num_blocks": 12}, id="preemption"),
        pytest.param({"max_loras": 2, "max_num_batched_tokens": 16}, id="fewer places"),
        pytest.param({"max_loras": 1, "num_blocks": 12}, id="one place, preemption"),
    ],
)
def test_contract_C19_a_batch_mixes_adapters_and_none(
    engine: MakeCore, adapter: Any, expected: list[list[int]], options: Options
) -> None:
    """Twice the same requests: the second time, from what the first left in the prefix cache."""
    core = engine(**options)
    numbers = [0, 1, 2, 3, 4, 2, 0, 1]
    for _ in range(2):
        requests = [
            core_request(f"r{i}", PROMPT, max_tokens=LENGTH, lora_request=adapter(number))
            for i, number in enumerate(numbers)
        ]
        made = run(core, *requests)
        for i, number in enumerate(numbers):
            assert made[f"r{i}"][-1].error is None
            assert tokens(made[f"r{i}"]) == expected[number], f"request {i}, adapter {number}"
    if "num_blocks" in options:
        assert core.stats().num_preemptions > 0
    assert core.stats().blocks_free == core.stats().blocks_total


def test_contract_C19_adapters_of_other_scales_and_types(
    engine: MakeCore, folder: Path, tmp_path: Path
) -> None:
    """rsLoRA divides by the root of the rank; half-precision files are converted."""
    path = save_adapter(tmp_path / "a", 9, rank=4, lora_alpha=3, use_rslora=True)
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({n: t.half() for n, t in load_file(file).items()}, file)
    save_file({n: t.half().float() for n, t in load_file(file).items()}, tmp_path / "exact")
    exact = tmp_path / "exact-adapter"
    exact.mkdir()
    (tmp_path / "exact").rename(exact / "adapter_model.safetensors")
    model = save_model(tmp_path / "m", merged(random_tensors(0), str(exact), scale=1.5))
    own = ask(engine(), LoRARequest("a", 1, path))
    assert own == generate(make_core(model, block_size=4), PROMPT, max_tokens=LENGTH)


# --- the prefix cache -----------------------------------------------------------------------------


def test_contract_B10_the_prefix_cache_does_not_mix_adapters(
    engine: MakeCore, adapter: Any
) -> None:
    core = engine()

    def cached(request: LoRARequest | None, salt: str | None = None) -> int:
        message = core_request("r", PROMPT, max_tokens=1, lora_request=request, cache_salt=salt)
        return run(core, message)["r"][-1].num_cached_tokens

    cases = [(None, None), (adapter(1), None), (adapter(2), None), (adapter(1), "salt")]
    assert [cached(*case) for case in cases] == [0] * 4
    assert [cached(*case) for case in cases] == [12] * 4


def test_contract_B10_new_files_under_an_old_name_find_no_old_blocks(
    engine: MakeCore, expected: list[list[int]], tmp_path: Path, folder: Path
) -> None:
    core = engine()
    path = tmp_path / "adapter"
    for number in (1, 2):
        path.unlink(missing_ok=True)
        path.symlink_to(folder / str(number))
        assert ask(core, LoRARequest("same", 7, str(path))) == expected[number]
        assert core.call("remove_lora", [7]) is True


def test_contract_B10_no_salt_reaches_the_blocks_of_an_adapter() -> None:
    adapter = Adapter(1, "name", "/path", "digest")
    names = {
        cache_identity(None, None),
        cache_identity("", None),
        cache_identity(None, adapter),
        cache_identity(cache_identity(None, adapter), None),
        cache_identity("salt", adapter),
    }
    assert len(names) == 5


# --- places ---------------------------------------------------------------------------------------


def test_contract_A07_the_least_recently_used_adapter_makes_room(
    engine: MakeCore, adapter: Any, expected: list[list[int]]
) -> None:
    core = engine(max_loras=2)
    for number in (1, 2):
        assert core.call("add_lora", [adapter(number)]) is True
    ask(core, adapter(1))
    assert ask(core, adapter(3)) == expected[3]
    assert set(core.call("list_loras", [])) == {1, 3}


def test_contract_A07_a_pinned_adapter_stays(engine: MakeCore, adapter: Any) -> None:
    core = engine(max_loras=3)
    for number in (1, 2, 3):
        core.call("add_lora", [adapter(number)])
    assert core.call("pin_lora", [1]) is True
    core.call("add_lora", [adapter(4)])
    assert set(core.call("list_loras", [])) == {1, 3, 4}
    assert core.call("pin_lora", [2]) is False, "it is not loaded"
    assert core.call("pin_lora", [3]) is True
    with pytest.raises(InvalidRequestError, match="at most 2 of 3"):
        core.call("pin_lora", [4])


def test_contract_A07_remove_says_whether_there_was_anything(
    engine: MakeCore, adapter: Any, expected: list[list[int]]
) -> None:
    core = engine()
    assert core.call("remove_lora", [1]) is False
    core.call("add_lora", [adapter(1)])
    assert core.call("remove_lora", [1]) is True
    assert core.call("remove_lora", [1]) is False
    assert core.call("list_loras", []) == []
    assert ask(core, adapter(1)) == expected[1], "a request brings its adapter along"


def test_contract_A07_a_removed_adapter_serves_those_under_way(
    engine: MakeCore, adapter: Any, expected: list[list[int]]
) -> None:
    core = engine(max_loras=2)
    core.add(core_request("r", PROMPT, max_tokens=LENGTH, lora_request=adapter(1)), CLIENT)
    made = step(core)
    assert core.call("remove_lora", [1]) is True
    assert core.call("list_loras", []) == []
    while not made[-1].finished:
        made += step(core)
    assert tokens(made) == expected[1]
    again = LoRARequest("a2", 1, adapter(2).lora_path)
    assert core.call("add_lora", [again]) is True, "its id is free once nobody uses it"
    assert ask(core, again) == expected[2]
    core.call("add_lora", [adapter(3)])
    assert set(core.call("list_loras", [])) == {1, 3}


def test_contract_A07_a_request_that_lacks_a_place_is_not_overtaken_for_ever(
    engine: MakeCore, adapter: Any
) -> None:
    """Adapter 1 has a request after the other; adapter 2's turn comes all the same."""
    core = engine(max_loras=1)
    core.add(core_request("first", PROMPT, max_tokens=20, lora_request=adapter(1)), CLIENT)
    core.add(core_request("other", PROMPT, max_tokens=2, lora_request=adapter(2)), CLIENT)
    for number in range(40):
        core.add(
            core_request(f"late{number}", PROMPT, max_tokens=20, lora_request=adapter(1)), CLIENT
        )
        if any(output.request_id == "other" and output.finished for output in step(core)):
            return
    pytest.fail("it never ran")


# --- without an event loop ------------------------------------------------------------------------


def test_contract_L10_the_synchronous_engine_has_the_same_adapters(
    folder: Path, adapter: Any, expected: list[list[int]]
) -> None:
    config = EngineConfig(str(folder / "base"), num_blocks=64, num_threads=1, max_loras=2)
    engine = LLMEngine(config)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    assert engine.add_lora(adapter(1)) is True
    assert engine.pin_lora(1) is True
    for number in (2, 3, 0):
        engine.add_request(str(number), PROMPT, params, lora_request=adapter(number))
    made = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            made[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert made == {number: expected[number] for number in (0, 2, 3)}
    assert 1 in engine.list_loras()
    assert engine.remove_lora(1) is True
    assert engine.remove_lora(1) is False
    with pytest.raises(UtilityError, match="No such file"):
        engine.add_lora(LoRARequest("a", 9, "/nowhere"))
    engine.shutdown()


def test_contract_L11_a_function_sees_the_model(folder: Path) -> None:
    engine = LLMEngine(EngineConfig(str(folder / "base"), num_blocks=64, num_threads=1))
    count = sum(tensor.numel() for tensor in random_tensors(0).values())
    assert engine.apply_model(lambda model: sum(p.numel() for p in model.parameters())) == [count]  # type: ignore[attr-defined]
    assert engine.collective_rpc("rank") == [0]
    engine.shutdown()
