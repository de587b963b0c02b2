"""Llama 2 and 3, SmolLM2."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec("llama", gguf_interleaves_pairs=True)
