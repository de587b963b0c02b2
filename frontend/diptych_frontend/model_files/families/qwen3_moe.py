"""Qwen 3, the mixtures of experts."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec(
    "qwen3_moe", qk_norm=True, has_experts=True, gguf_architecture="qwen3moe"
)
