"""Models for vLLM whose answers depend on all of their KV, which is not all kept in one way.

Their weights are those of `model_kit.sensitive_model`, with other attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from model_kit.sensitive_model import (
    HIDDEN,
    OUTPUT_SCALE,
    VALUE_SCALE,
    VOCABULARY,
    Matrix,
    save_sensitive_model,
    sensitive_tensors,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

WINDOW = 64
SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = (SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING)
"""What each layer attends to. vLLM makes three groups of them, of two layers."""
EVEN_SHARPNESS = 2.0
"""With it, foreign keys and values in any block of any of these layers change the answer."""
LATENT_LAYERS, LATENT_HEADS, LATENT_HEAD, LATENT, ROTATED = 4, 2, 32, 512, 64
"""vLLM's CPU backend computes latent attention with 512 + 64 numbers for each token."""


def save_model_of_windows(folder: Path) -> str:
    """A Llama, some of whose layers attend to a window, with a tokenizer; returns its path."""
    save_sensitive_model(folder, heads=4, sharpness=[EVEN_SHARPNESS] * len(LAYERS))
    return complete_for_vllm(folder, layer_types=LAYERS, sliding_window=WINDOW)


def save_latent_model(folder: Path) -> str:
    """A DeepSeek-V2 without experts, with a tokenizer; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "deepseek_v2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LATENT_LAYERS,
        "first_k_dense_replace": LATENT_LAYERS,
        "n_routed_experts": 2,
        "num_attention_heads": LATENT_HEADS,
        "num_key_value_heads": LATENT_HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": LATENT_HEAD,
        "qk_rope_head_dim": ROTATED,
        "v_head_dim": LATENT_HEAD,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = sensitive_tensors(1, [EVEN_SHARPNESS] * LATENT_LAYERS, _latent_attention)
    save_file(tensors, folder / "model.safetensors")
    return complete_for_vllm(folder, architectures=["DeepseekV2ForCausalLM"])


def _latent_attention(matrix: Matrix, sharpness: float) -> dict[str, Tensor]:
    width = LATENT_HEADS * LATENT_HEAD
    keys, values = matrix(width, LATENT, sharpness), matrix(width, LATENT, VALUE_SCALE)
    by_head = [x.reshape(LATENT_HEADS, LATENT_HEAD, LATENT) for x in (keys, values)]
    return {
        "q_proj": matrix(LATENT_HEADS * (LATENT_HEAD + ROTATED), HIDDEN, sharpness),
        "kv_a_proj_with_mqa": matrix(LATENT + ROTATED, HIDDEN, sharpness),
        "kv_a_layernorm": torch.ones(LATENT),
        "kv_b_proj": torch.cat(by_head, dim=1).reshape(2 * width, LATENT),
        "o_proj": matrix(HIDDEN, width, OUTPUT_SCALE),
    }


def complete_for_vllm(folder: Path, **config: Any) -> str:
    """Add what vLLM wants beside weights to a checkpoint: more configuration, and a tokenizer whose
    tokens are words of no meaning. Returns its path."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | config
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | config))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return str(folder)
