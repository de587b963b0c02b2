"""Qwen 2 and 2.5."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec("qwen2", attention_bias=True)
