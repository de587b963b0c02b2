"""Gemma 2: as Gemma 3, with soft caps instead of norms of heads, and one RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from diptych_frontend.model_files.families import gemma3_text

FAMILY: Final = replace(
    gemma3_text.FAMILY,
    architecture="gemma2",
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
)
