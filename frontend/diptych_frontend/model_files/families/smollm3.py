"""SmolLM3: every fourth layer has no RoPE."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec(
    "smollm3",
    unrotated_period=4,
    config_defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    gguf_interleaves_pairs=True,
)
