"""Qwen 3, the dense models."""

from __future__ import annotations

from typing import Final

from diptych_frontend.model_files.family_spec import FamilySpec

FAMILY: Final = FamilySpec("qwen3", qk_norm=True)
