"""The families of supported models, as data.

To add one, write a row here, a row of `CONFIGS` in `tests/support/model_kit/families.py`, and, if
its layers compute what no other's do, a model class in `engine/diptych_engine/models/`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from diptych_frontend.model_files.family_spec import GGUF_TENSORS, FamilySpec
from diptych_protocol import SamplingDefaults

_GEMMA3: Final = FamilySpec(
    "gemma3_text",
    "Gemma 3, the models without images, and the decoder of the others in GGUF files",
    qk_norm=True,
    uses_window=True,
    window_period=6,
    window_rope_theta=10000.0,
    scales_embeddings=True,
    gate="gelu_tanh",
    norms_after=True,
    norms_from_one=True,
    config_defaults={
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "sliding_window": 4096,
    },
    parts={
        "post_attention_layernorm": ("norm_after_attention",),
        "pre_feedforward_layernorm": ("post_attention_layernorm",),
        "post_feedforward_layernorm": ("norm_after_mlp",),
    },
    gguf_architecture="gemma3",
    gguf_tensors=GGUF_TENSORS
    | {
        "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
        "blk.N.ffn_norm": "model.layers.N.pre_feedforward_layernorm",
        "blk.N.post_ffw_norm": "model.layers.N.post_feedforward_layernorm",
    },
    gguf_ends=("<end_of_turn>",),
    gguf_attention_scales={62: 168**-0.5},
    # generation_config.json of google/gemma-3-4b-it, whose temperature is the default
    gguf_sampling=SamplingDefaults(temperature=1.0, top_p=0.95, top_k=64, min_p=0.0),
)
_IDEFICS3: Final = FamilySpec(
    "idefics3",
    "Idefics 3",
    model="idefics3",
    sees=True,
    text_prefix="model.text_model.",
    gguf_architecture=None,
)
_ALL: Final = (
    replace(
        _GEMMA3,
        architecture="gemma2",
        about="Gemma 2: as Gemma 3, with soft caps instead of norms of heads, and one RoPE",
        qk_norm=False,
        window_period=2,
        window_rope_theta=None,
        config_defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        gguf_architecture="gemma2",
        gguf_attention_scales={46: 144**-0.5},
    ),
    _GEMMA3,
    FamilySpec(
        "gpt_oss",
        "gpt-oss: sinks of attention, a window in every second layer, and experts with biases",
        attention_bias=True,
        output_bias=True,
        attention_sinks=True,
        expert_bias=True,
        uses_window=True,
        window_period=2,
        gate="clamped",
        has_experts=True,
        config_keys={"moe_intermediate_size": "intermediate_size"},
        config_defaults={
            "attention_bias": True,
            "norm_topk_prob": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
        transposes_experts=True,
        parts={"mlp.router": ("mlp.gate",)},
        gguf_architecture="gpt-oss",
        gguf_ends=("<|return|>", "<|call|>"),
        gguf_yarn_truncates=False,
        gguf_tensors=GGUF_TENSORS
        | {
            "blk.N.attn_sinks.weight": "model.layers.N.self_attn.sinks",
            "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
            "blk.N.ffn_gate_inp": "model.layers.N.mlp.router",
        },
        # the README of openai/gpt-oss
        gguf_sampling=SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
    ),
    FamilySpec(
        "granite",
        "Granite 3, and in GGUF files the dense models of Granite 4: Llama with four multipliers",
        config_defaults={"attention_multiplier": 1.0},
        gguf_interleaves_pairs=True,
        gguf_finetuned_is_rope=True,
    ),
    FamilySpec(
        "granitemoehybrid",
        "Granite 4, the dense models. Those with Mamba layers or experts are refused",
        position_embedding_type="rope",
        gguf_architecture=None,
        config_keys={"intermediate_size": "shared_intermediate_size"},
        config_needs={"layer_types": "all layers are Mamba's; the dense models name theirs"},
        config_defaults={"attention_multiplier": 1.0},
        parts={
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_mlp.output_linear": ("mlp.down_proj",),
        },
    ),
    _IDEFICS3,
    FamilySpec("llama", "Llama 2 and 3, SmolLM2", gguf_interleaves_pairs=True),
    FamilySpec(
        "mistral",
        "Mistral 7B; v0.1 has a sliding window",
        uses_window=True,
        gguf_interleaves_pairs=True,
        gguf_architecture=None,
    ),
    FamilySpec(
        "phi3",
        "Phi-3 and Phi-4-mini: fused projections, and RoPE over a part of each head",
        uses_window=True,
        config_defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        parts={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        gguf_ends=("<|end|>",),
        gguf_tensors=GGUF_TENSORS
        | {
            "blk.N.attn_qkv": "model.layers.N.self_attn.qkv_proj",
            "blk.N.ffn_up": "model.layers.N.mlp.gate_up_proj",
        },
    ),
    FamilySpec("qwen2", "Qwen 2 and 2.5", attention_bias=True),
    FamilySpec(
        "qwen3",
        "Qwen 3, the dense models",
        qk_norm=True,
        # the card of Qwen/Qwen3-8B, for answers with reasoning
        gguf_sampling=SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0),
    ),
    FamilySpec(
        "qwen3_moe",
        "Qwen 3, the mixtures of experts",
        qk_norm=True,
        has_experts=True,
        gguf_architecture="qwen3moe",
        # the card of Qwen/Qwen3-30B-A3B, for answers with reasoning
        gguf_sampling=SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0),
    ),
    FamilySpec(
        "smollm3",
        "SmolLM3: every fourth layer has no RoPE",
        unrotated_period=4,
        config_defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
        gguf_interleaves_pairs=True,
        # the card of HuggingFaceTB/SmolLM3-3B
        gguf_sampling=SamplingDefaults(temperature=0.6, top_p=0.95, top_k=0, min_p=0.0),
    ),
    replace(_IDEFICS3, architecture="smolvlm", about="SmolVLM and SmolVLM 2, without video"),
)
FAMILIES: Final = {spec.architecture: spec for spec in _ALL}
"""The families by architecture: `model_type` of config.json."""
GGUF_ARCHITECTURES: Final = {
    spec.gguf_architecture or name: name
    for name, spec in FAMILIES.items()
    if spec.gguf_architecture is not None
}
"""`general.architecture` of a GGUF file -> the family's architecture."""
