"""Adapters whose files are no good, or change: an error that says why, and an engine that lives."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.core import CLIENT, core_request, generate, make_core, run, step, tokens
from model_kit.checkpoints import MODULES, merged, random_tensors, save_adapter, save_model
from safetensors.torch import save_file

from diptych_engine.control.core import EngineCore
from diptych_protocol import InvalidRequestError, LoRARequest
from diptych_protocol.weights import numbered

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
LENGTH = 12
MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter `1` that leaves out some modules, an adapter `2`, and a merged model."""
    root = tmp_path_factory.mktemp("lora")
    save_model(root / "base", random_tensors(0))
    first = save_adapter(root / "1", 1, rank=2, modules=list(MODULES)[:3])
    save_adapter(root / "2", 2)
    save_model(root / "merged", merged(random_tensors(0), first))
    return root


@pytest.fixture(scope="module")
def engine(folder: Path) -> MakeCore:
    def make(model: str = "base", **options: Any) -> EngineCore:
        return make_core(str(folder / model), **{"block_size": 4, **options})

    return make


@pytest.fixture(scope="module")
def expected(engine: MakeCore) -> list[list[int]]:
    """Greedy tokens without an adapter, and with adapter 1."""
    return [generate(engine(m), PROMPT, max_tokens=LENGTH) for m in ("base", "merged")]


@pytest.fixture
def adapter(folder: Path) -> Callable[[int], LoRARequest]:
    return lambda number: LoRARequest(f"a{number}", number, str(folder / str(number)))


def ask(core: EngineCore, request: LoRARequest) -> list[int]:
    return generate(core, PROMPT, max_tokens=LENGTH, lora_request=request)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"r": 65}, "rank 65 is not in 1..64"),
    "factor": ({"lora_alpha": 1e39}, r"lora_alpha 1e\+39 is no float32"),
    "dora": ({"use_dora": True}, "DoRA"),
    "bias": ({"bias": "all"}, "bias 'all'"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pattern": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "other method": ({"peft_type": "IA3"}, "'IA3' is not LORA"),
    "no rank": ({"r": None}, "Expected `int`"),
    "other rank": ({"r": 3}, "not floats"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_contract_C19_a_configuration_that_is_no_good_is_an_error(
    engine: MakeCore, tmp_path: Path, name: str
) -> None:
    fields, message = BROKEN[name]
    core = engine()
    with pytest.raises(InvalidRequestError, match=message):
        core.call("add_lora", [LoRARequest("a", 1, save_adapter(tmp_path, 1, **fields))])
    assert core.call("list_loras", []) == []


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "x" * 257])
def test_contract_C19_a_name_is_one_that_a_line_can_show(
    engine: MakeCore, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidRequestError, match="printable characters"):
        engine().call("add_lora", [LoRARequest(name, 1, save_adapter(tmp_path, 1))])


def test_contract_C19_tensors_without_a_place_are_an_error(
    engine: MakeCore, tmp_path: Path
) -> None:
    core, file = engine(), tmp_path / "adapter_model.safetensors"
    prefix = "base_model.model.model.layers."
    for tensors, message in (
        ({f"{prefix}7.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}, "no place"),
        ({f"{prefix}0.mlp.router.lora_A.weight": torch.zeros(4, 32)}, "no place"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "no place"),
        ({f"{prefix}0.mlp.up_proj.lora_A.weight": torch.zeros(4, 31)}, "not floats"),
        ({f"{prefix}0.mlp.up_proj.lora_A.weight": torch.zeros(4, 32).int()}, "not floats"),
        ({f"{prefix}0.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}, "belong together"),
        ({f"{prefix}0.mlp.up_proj.lora_A.weight": torch.full((4, 32), math.nan)}, "no finite"),
        ({}, "no tensors"),
    ):
        save_adapter(tmp_path, 1)
        save_file(tensors, file)
        with pytest.raises(InvalidRequestError, match=message):
            core.call("add_lora", [LoRARequest("a", 1, str(tmp_path))])
    for content in (b"", b"garbage", (1 << 60).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content)
        with pytest.raises(InvalidRequestError, match="adapter "):
            core.call("add_lora", [LoRARequest("a", 1, str(tmp_path))])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_contract_C19_a_file_that_is_a_pipe_is_not_waited_for(
    engine: MakeCore, tmp_path: Path, name: str
) -> None:
    core = engine()
    save_adapter(tmp_path, 1)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidRequestError, match="no ordinary file"):
        core.call("add_lora", [LoRARequest("a", 1, str(tmp_path))])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LoRARequest("a", 1, "/nowhere"), "No such file"),
        (LoRARequest("a", 0, "/nowhere"), "lora_int_id"),
        (LoRARequest("", 1, "/nowhere"), "name"),
        (LoRARequest("a", 1), "path"),
    ],
)
def test_contract_C19_a_request_that_names_no_adapter_fails_alone(
    engine: MakeCore, expected: list[list[int]], request_: LoRARequest, message: str
) -> None:
    core = engine()
    made = run(
        core,
        core_request("bad", PROMPT, lora_request=request_),
        core_request("good", PROMPT, max_tokens=LENGTH),
    )
    assert message in (made["bad"][-1].error or "")
    assert tokens(made["good"]) == expected[0]


def test_contract_C19_an_engine_may_take_no_adapters(engine: MakeCore, adapter: Any) -> None:
    with pytest.raises(InvalidRequestError, match="max_loras is 0"):
        engine(max_loras=0).call("add_lora", [adapter(1)])


def test_contract_C19_files_that_change_while_a_request_waits_fail_it_alone(
    engine: MakeCore, expected: list[list[int]], tmp_path: Path, adapter: Any
) -> None:
    core = engine()
    request = LoRARequest("a", 9, save_adapter(tmp_path, 1))
    core.add(core_request("changed", PROMPT, lora_request=request), CLIENT)
    save_adapter(tmp_path, 2)
    core.add(core_request("good", PROMPT, max_tokens=LENGTH, lora_request=adapter(1)), CLIENT)
    outputs = []
    while core.has_work:
        outputs += step(core)
    errors = {out.request_id: out.error for out in outputs if out.error}
    assert list(errors) == ["changed"]
    assert "changed since" in (errors["changed"] or "")
    assert tokens([o for o in outputs if o.request_id == "good"]) == expected[1]
    assert core.stats().blocks_free == core.stats().blocks_total


def test_contract_C19_one_id_is_one_adapter(engine: MakeCore, adapter: Any) -> None:
    core = engine()
    core.call("add_lora", [adapter(1)])
    first, second = adapter(1), adapter(2)
    for name, path in ((second.lora_name, first.lora_path), (first.lora_name, second.lora_path)):
        with pytest.raises(InvalidRequestError, match="take another id"):
            core.call("add_lora", [LoRARequest(name, 1, path)])


def test_contract_C19_adapters_of_the_configuration_are_there_from_the_start(
    engine: MakeCore, folder: Path, expected: list[list[int]]
) -> None:
    modules = {"first": str(folder / "1"), "second": str(folder / "2")}
    first, second = numbered(modules)
    core = engine(lora_modules=modules)
    assert core.call("list_loras", []) == [first.lora_int_id, second.lora_int_id]
    assert ask(core, first) == expected[1]
    with pytest.raises(InvalidRequestError, match="No such file"):
        engine(lora_modules={"first": "/nowhere"})
    with pytest.raises(InvalidRequestError, match="the model's own name"):
        engine(lora_modules={"base": str(folder / "1")})


def test_contract_C19_no_two_adapters_of_a_configuration_have_one_id() -> None:
    """The digests of these two begin alike."""
    first, second = numbered({"a15381": "/a15381", "a62360": "/a62360"})
    [alone] = numbered({"a62360": "/a62360"})
    assert first.lora_int_id == alone.lora_int_id
    assert second.lora_int_id == first.lora_int_id + 1


def test_contract_C19_the_configuration_as_peft_writes_it(
    engine: MakeCore, expected: list[list[int]], folder: Path, tmp_path: Path
) -> None:
    """Keys that do not matter here are ignored."""
    path = save_adapter(tmp_path, 1, rank=2, modules=list(MODULES)[:3])
    file = tmp_path / "adapter_config.json"
    fields = json.loads(file.read_text())
    fields |= {
        "auto_mapping": None, "base_model_name_or_path": "some/model", "inference_mode": True,
        "init_lora_weights": True, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1,
        "task_type": "CAUSAL_LM", "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False,
    }  # fmt: skip
    file.write_text(json.dumps(fields))
    assert ask(engine(), LoRARequest("a", 1, path)) == expected[1]
