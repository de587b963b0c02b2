"""SmolLM3: every fourth layer has no RoPE."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_protocol import SamplingDefaults

FAMILY: Final = FamilySpec(
    "smollm3",
    unrotated_period=4,
    config_defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    gguf_interleaves_pairs=True,
    # the card of HuggingFaceTB/SmolLM3-3B
    gguf_sampling=SamplingDefaults(temperature=0.6, top_p=0.95, top_k=0, min_p=0.0),
)
