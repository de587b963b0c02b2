"""Phi-3 and Phi-4-mini: fused projections, and RoPE over a part of each head."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import GGUF_TENSORS, FamilySpec

FAMILY: Final = FamilySpec(
    "phi3",
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
)
