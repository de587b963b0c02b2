"""SmolVLM and SmolVLM 2, without video."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec(
    "smolvlm",
    model="idefics3",
    sees=True,
    text_prefix="model.text_model.",
    gguf_architecture=None,
)
