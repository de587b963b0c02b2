"""Granite 3, and in GGUF files the dense models of Granite 4: Llama with four multipliers."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec(
    "granite",
    config_defaults={"attention_multiplier": 1.0},
    gguf_interleaves_pairs=True,
    gguf_finetuned_is_rope=True,
)
