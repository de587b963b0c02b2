"""GGUF files of each family give the logits of their Hugging Face class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from model_kit.families import SIZES, published
from model_kit.family_gguf import k_quants, save_family_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych_frontend.model_files.model_source import resolve_model

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "granite": {},
    "phi3": {},
    "phi3 long rope": {},
    "phi3 short rope": {},
    "gemma3_text": {
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma2": {"query_pre_attn_scalar": 16},
    "gpt_oss": {},
    "qwen2": {},
    "qwen3": {},
}
"""What a file does not say is as llama.cpp has it for the architecture."""
RULES_OF_ROPE = ("phi3 long rope", "phi3 short rope")


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(
    name: str, tmp_path: Path, lone_sequence: Callable[..., Any]
) -> None:
    model = published(name, tmp_path / "published", CASES[name])
    source = resolve_model(save_family_gguf(tmp_path / "model.gguf", model))
    token_ids = torch.randint(0, SIZES["vocab_size"], (70,))
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    actual = lone_sequence(source, 96).logits_in_chunks(token_ids.tolist(), [40, 29, 1])
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


OF_WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4,
    "initializer_range": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name not in RULES_OF_ROPE])
def test_k_quants_of_each_family(
    name: str, tmp_path: Path, lone_sequence: Callable[..., Any]
) -> None:
    """The mixture of types of Q4_K_M, as it is and in tiles."""
    sizes = OF_WHOLE_BLOCKS | ({"query_pre_attn_scalar": 64} if "gemma" in name else {})
    model = published(name, tmp_path / "published", CASES[name] | sizes)
    blocks = k_quants(model)
    source = resolve_model(save_family_gguf(tmp_path / "model.gguf", model, blocks=blocks))
    token_ids = torch.randint(0, SIZES["vocab_size"], (40,))
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    plain = lone_sequence(source, 48)
    actual = plain.logits_in_chunks(token_ids.tolist(), [25, 14, 1])
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    packed = lone_sequence(source, 48, packs=True).model
    for (own, values), (_, other) in zip(
        packed.named_parameters(), plain.model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(values, other, atol=2e-3, rtol=2e-3, msg=own)


def rounded_experts(model: Any) -> dict[str, Tensor]:
    """Round a model's experts to MXFP4; their blocks and scales as gpt-oss publishes them."""
    published: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        rows = np.ascontiguousarray(parameter.detach().transpose(1, 2).numpy())
        raw = gguf.quants.quantize(rows, Kind.MXFP4)
        values = torch.from_numpy(gguf.quants.dequantize(raw, Kind.MXFP4))
        with torch.no_grad():
            parameter.copy_(values.transpose(1, 2))
        groups = torch.from_numpy(raw).unflatten(-1, (-1, 17))
        halves = groups[..., 1:]  # the first 16 levels are in the low bits, the others in the high
        levels = torch.cat((halves & 15, halves >> 4), -1).unflatten(-1, (16, 2))
        published[f"{name}_blocks"] = levels[..., 0] | levels[..., 1] << 4
        published[f"{name}_scales"] = groups[..., 0].contiguous()
    return published


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_experts_in_mxfp4(form: str, tmp_path: Path, lone_sequence: Callable[..., Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    folder = tmp_path / "published"
    model = published("gpt_oss", folder, sizes)
    blocks = rounded_experts(model)
    [path] = folder.glob("*.safetensors")
    kept = {
        name: tensor for name, tensor in load_file(path).items() if f"{name}_blocks" not in blocks
    }
    save_file(kept | blocks, path)
    uri = str(folder)
    if form == "gguf":
        uri = save_family_gguf(tmp_path / "model.gguf", model, "MXFP4")
    with torch.inference_mode():
        expected = model(torch.arange(40)[None]).logits[0]
    actual = lone_sequence(resolve_model(uri), 48).logits(list(range(40)))
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
