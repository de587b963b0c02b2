"""Mistral 7B; v0.1 has a sliding window."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec(
    "mistral", uses_window=True, gguf_interleaves_pairs=True, gguf_architecture=None
)
