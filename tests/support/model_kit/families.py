"""Tiny random models of each family, as transformers computes them.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers  # its classes are imported when they are used

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 2.0,
}
PARTIAL_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
    }
}
LONG_ROPE: dict[str, Any] = {
    "hidden_size": 96,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
    },
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "llama wide heads": ("LlamaConfig", SIZES | {"head_dim": 16}),
    "llama no sharing": ("LlamaConfig", SIZES | {"num_key_value_heads": 6}),
    "llama3 rope": ("LlamaConfig", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("LlamaConfig", SIZES | {"rope_parameters": LINEAR_ROPE}),
    "yarn rope": ("Qwen3Config", SIZES | {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    "yarn rope of its own kind": (
        "LlamaConfig",
        SIZES
        | {"head_dim": 32}
        | {
            "rope_parameters": YARN_ROPE
            | {"beta_fast": 8, "beta_slow": 0.5, "truncate": False}
            | {"mscale": 1.5, "mscale_all_dim": 0.5}
        },
    ),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": None}),
    "mistral window": ("MistralConfig", SIZES | {"sliding_window": 20}),
    "smollm3": ("SmolLM3Config", SIZES | {"no_rope_layer_interval": 2}),
    "granite": ("GraniteConfig", SIZES | MULTIPLIERS),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        SIZES
        | MULTIPLIERS
        | {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 3,
            "mamba_n_heads": 4,
        },
    ),
    "phi3": ("Phi3Config", SIZES | PARTIAL_ROPE),
    "phi3 long rope": ("Phi3Config", SIZES | LONG_ROPE),
    "phi3 short rope": (
        "Phi3Config",
        SIZES | LONG_ROPE | {"original_max_position_embeddings": 128},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        SIZES
        | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20}
        | {"sliding_window_pattern": 2, "tie_word_embeddings": True}
        | {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}},
    ),
    "gemma2": (
        "Gemma2Config",
        SIZES
        | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gpt_oss": (
        "GptOssConfig",
        SIZES
        | {"head_dim": 16, "sliding_window": 20, "num_local_experts": 5}
        | {"rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
    "qwen2": ("Qwen2Config", SIZES | {"rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | EXPERTS),
    "qwen3_moe mixed layers": (
        "Qwen3MoeConfig",
        SIZES
        | EXPERTS
        | {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    ),
}


def config_of(name: str, changes: dict[str, Any] | None = None) -> transformers.PretrainedConfig:
    """transformers' own configuration of one model."""
    kind, sizes = CONFIGS[name]
    config: transformers.PretrainedConfig = getattr(transformers, kind)(**sizes | (changes or {}))
    return config


def published(
    name: str, folder: Path, changes: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A random model whose norms and biases matter too, saved under `folder`."""
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config_of(name, changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder, **options)
    return model
