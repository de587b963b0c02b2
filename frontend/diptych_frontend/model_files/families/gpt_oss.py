"""gpt-oss: sinks of attention, a window in every second layer, and experts with biases."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import GGUF_TENSORS, FamilySpec
from diptych_protocol import SamplingDefaults

FAMILY: Final = FamilySpec(
    "gpt_oss",
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
)
