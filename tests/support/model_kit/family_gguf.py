"""GGUF files of any family, with the names and metadata that llama.cpp's converter gives them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from model_kit.quantised import quantise
from torch import Tensor

ARCHITECTURES: Final = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "granite": MODEL_ARCH.GRANITE,
    "phi3": MODEL_ARCH.PHI3,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
"""The families whose models can be saved, by `model_type`."""
PERMUTED: Final = ("llama", "mistral", "smollm3", "granite")
"""Families with the two rows of each rotated pair side by side."""


def k_quants(model: Any) -> dict[str, tuple[Tensor, GGMLQuantizationType]]:
    """Round the matrices of a model's layers as Q4_K_M does; their blocks, and of which type."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            kind = GGMLQuantizationType["Q6_K" if "v_proj" in name or "down" in name else "Q4_K"]
            raw = quantise(parameter.detach().numpy(), kind)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
            found[name] = torch.from_numpy(raw), kind
    return found


def save_family_gguf(
    path: Path,
    model: Any,
    experts: str = "F32",
    blocks: Mapping[str, tuple[Tensor, GGMLQuantizationType]] = MappingProxyType({}),
) -> str:
    """Save transformers' own model; its path. experts: the type of their matrices. blocks: what
    `k_quants` returned."""
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_metadata(writer, config)
    kinds = {name: kind for name, (_, kind) in blocks.items()}
    state = model.state_dict() | {name: raw for name, (raw, _) in blocks.items()}
    for name, tensor in _converted(state, model.config):
        stem, _, ending = name.rpartition(".")
        if ending not in ("weight", "bias"):
            stem, ending = name, "weight"
        short = names.get_name(stem) or stem
        kind = GGMLQuantizationType[experts if "exps" in short and ending == "weight" else "F32"]
        data = np.ascontiguousarray(tensor.detach().numpy())
        kind = kinds.get(name, kind)
        if name not in kinds:
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(f"{short}.{ending}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _converted(state: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
            dim = getattr(config, "head_dim", None) or (
                config.hidden_size // config.num_attention_heads
            )
            halves = tensor.view(-1, 2, dim // 2, tensor.shape[1])
            yield name, halves.transpose(1, 2).reshape(tensor.shape)
        elif config.model_type.startswith("gemma") and "norm" in name:
            yield name, tensor + 1.0
        elif "experts" in name:
            yield from _experts(name, tensor)
        else:
            yield name, tensor
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Those of gpt-oss: the gate apart, and rows that are outputs."""
    layer, ending = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    rows = tensor if ending == "bias" else tensor.transpose(1, 2)
    if "down_proj" in name:
        yield f"blk.{layer}.ffn_down_exps.{ending}", rows
    else:
        yield f"blk.{layer}.ffn_gate_exps.{ending}", rows[:, ::2]
        yield f"blk.{layer}.ffn_up_exps.{ending}", rows[:, 1::2]


def _add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    match config.model_type:
        case "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        case "phi3":
            dim = config.hidden_size // config.num_attention_heads
            writer.add_rope_dimension_count(int(dim * rope["partial_rotary_factor"]))
            writer.add_sliding_window(config.sliding_window or 0)
            if rope["rope_type"] == "longrope":
                trained = config.original_max_position_embeddings
                growth = config.max_position_embeddings / trained
                writer.add_rope_scaling_orig_ctx_len(trained)
                factor = (1.0 + np.log(growth) / np.log(trained)) ** 0.5
                writer.add_rope_scaling_attn_factors(float(factor))
        case "gemma2":
            writer.add_sliding_window(config.sliding_window)
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        case "gemma3_text" | "gpt_oss":
            writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gpt_oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
