"""Qwen 3, the dense models."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec
from diptych_protocol import SamplingDefaults

FAMILY: Final = FamilySpec(
    "qwen3",
    qk_norm=True,
    # the card of Qwen/Qwen3-8B, for answers with reasoning
    gguf_sampling=SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0),
)
