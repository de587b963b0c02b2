"""Gemma 3, the models without images, and the decoder of the others in GGUF files."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import GGUF_TENSORS, FamilySpec
from diptych_protocol import SamplingDefaults

FAMILY: Final = FamilySpec(
    "gemma3_text",
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
