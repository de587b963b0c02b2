"""Small checkpoints and adapters on disk, in Hugging Face's and PEFT's forms.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEAD_DIM = 8
MODULES: dict[str, tuple[int, int]] = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
"""Module -> [out, in]."""


def random_tensors(seed: int) -> dict[str, Tensor]:
    """A model whose outputs depend on every token of the context."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": randn(64, 32),
        "model.norm.weight": 1.0 + randn(32),
        "lm_head.weight": randn(64, 32),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for module, shape in MODULES.items():
            tensors[f"{prefix}{module}.weight"] = randn(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1.0 + randn(32)
    return tensors


def save_model(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    """A Llama checkpoint, of `SIZES` where `config` says nothing; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **config}))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def save_cut(folder: Path, model: str, num_layers: int) -> str:
    """A model of the first layers of another, with its tokenizer; returns its path."""
    tensors = {
        name: tensor
        for name, tensor in load_file(Path(model) / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    path = save_model(folder, tensors, num_hidden_layers=num_layers)
    tokenizer = Path(model) / "tokenizer.json"
    if tokenizer.exists():
        shutil.copy(tokenizer, folder)
    return path


def save_adapter(
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    modules: Sequence[str] = tuple(MODULES),
    shapes: Mapping[str, tuple[int, int]] = MODULES,
    **config: Any,
) -> str:
    """A PEFT adapter with random matrices; returns its path. shapes: as `MODULES`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for module in modules:
            num_outputs, num_inputs = shapes[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(rank, num_inputs, generator=generator)
            b = torch.randn(num_outputs, rank, generator=generator)
            tensors[f"{name}.lora_A.weight"] = 0.2 * a
            tensors[f"{name}.lora_B.weight"] = 0.2 * b
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def merged(tensors: dict[str, Tensor], adapter: str, scale: float = 2.0) -> dict[str, Tensor]:
    """The model's tensors with an adapter's product in them."""
    pairs = load_file(Path(adapter) / "adapter_model.safetensors")
    result = dict(tensors)
    for name, a in pairs.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = pairs[name.replace("lora_A", "lora_B")]
            result[f"{module}.weight"] = tensors[f"{module}.weight"] + scale * (b @ a)
    return result
