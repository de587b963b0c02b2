"""What holds for every engine holds for one that sees: ranks, sleep, new weights, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit.core import core_request, make_core, run, tokens
from model_kit.pictures import encoded, picture
from model_kit.seeing import TEXT, save_seeing_model, seeing_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych_engine.control.core import EngineCore
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import Array, LoRARequest, TokensPrompt, WeightTransferUpdateRequest


@pytest.fixture(scope="module")
def prompt(published: Any) -> TokensPrompt:
    renderer = TextRenderer(resolve_model(published.uri))
    images: Any = {"image": [encoded(picture(1)), encoded(picture(2))]}
    return renderer.render_prompt({"prompt": "<image>and<image>?", "multi_modal_data": images})


def answer(core: EngineCore, prompt: TokensPrompt, **fields: Any) -> list[int]:
    message = core_request(
        "r", prompt["prompt_token_ids"], mm_features=prompt["mm_features"], max_tokens=6, **fields
    )
    [outputs] = run(core, message).values()
    assert outputs[-1].error is None
    return tokens(outputs)


def call(core: EngineCore, method: str, *args: Any) -> Any:
    result = core.call(method, list(args))
    core.deferred.settle()
    return result.result() if hasattr(result, "result") else result


@pytest.fixture(scope="module")
def expected(published: Any, prompt: TokensPrompt) -> list[int]:
    core = make_core(published.uri)
    found = answer(core, prompt)
    core.close()
    assert published.worst_gap(prompt, found) < 1e-2
    return found


def test_two_ranks_see_what_one_sees(
    published: Any, prompt: TokensPrompt, expected: list[int]
) -> None:
    core = make_core(published.uri, tensor_parallel_size=2, max_num_batched_tokens=32)
    try:
        assert answer(core, prompt) == expected
        assert call(core, "reset_encoder_cache") == "2 images have to be encoded again"
        call(core, "reset_prefix_cache", True)
        assert answer(core, prompt) == expected
    finally:
        core.close()


@pytest.mark.parametrize("level", [1, 2])
def test_contract_C14_an_engine_that_slept_sees_as_before(
    published: Any, prompt: TokensPrompt, expected: list[int], level: int
) -> None:
    core = make_core(published.uri)
    assert answer(core, prompt) == expected
    call(core, "sleep", level)
    call(core, "wake_up")
    assert answer(core, prompt) == expected
    assert core.stats().images_encoded == 4
    core.close()


def as_array(tensor: Tensor) -> Array:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Array("float32", tuple(tensor.shape), data)


def test_contract_C14_new_weights_see_anew(
    published: Any, prompt: TokensPrompt, expected: list[int], tmp_path: Path
) -> None:
    """The tower is replaced with the decoder, and nothing that the old one saw is used again."""
    save_seeing_model(tmp_path, seeing_config("smolvlm"), seed=7)
    other = make_core(str(tmp_path))
    wanted = answer(other, prompt)
    other.close()
    assert wanted != expected
    core = make_core(published.uri)
    assert answer(core, prompt) == expected
    call(core, "pause_generation", "abort", False)
    call(core, "start_weight_update")
    tensors = load_file(tmp_path / "model.safetensors")
    update = WeightTransferUpdateRequest(
        names=list(tensors), arrays=[as_array(tensor) for tensor in tensors.values()]
    )
    core.call("update_weights", [update], lambda value, kind: value)
    call(core, "finish_weight_update")
    call(core, "resume_generation")
    assert answer(core, prompt) == wanted
    core.close()


def test_an_adapter_changes_the_decoder_only(
    published: Any, prompt: TokensPrompt, expected: list[int], tmp_path: Path
) -> None:
    size = TEXT["hidden_size"]
    generator = torch.Generator().manual_seed(3)

    def save(number: int, folder: str, module: str) -> LoRARequest:
        path = tmp_path / folder
        path.mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(config))
        name = f"base_model.model.model.{module}.self_attn.q_proj"
        a, b = (torch.randn(shape, generator=generator) for shape in ((2, size), (size, 2)))
        save_file(
            {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b},
            path / "adapter_model.safetensors",
        )
        return LoRARequest(folder, number, str(path))

    core = make_core(published.uri)
    adapter = save(1, "decoder", "text_model.layers.1")
    assert answer(core, prompt, lora_request=adapter) != expected
    assert core.stats().images_encoded == 2
    assert answer(core, prompt) == expected
    assert core.stats().images_encoded == 2, "the features do not depend on the adapter"
    message = core_request(
        "tower", [1, 2], lora_request=save(2, "tower", "vision_model.encoder.layers.1")
    )
    [outputs] = run(core, message).values()
    assert "has no place in this model" in (outputs[-1].error or "")
    core.close()
