"""Idefics 3."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec(
    "idefics3",
    model="idefics3",
    sees=True,
    text_prefix="model.text_model.",
    gguf_architecture=None,
)
