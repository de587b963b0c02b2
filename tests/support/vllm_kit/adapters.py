"""Adapters of the sensitive model."""

from __future__ import annotations

from pathlib import Path

from model_kit.checkpoints import MODULES, merged, save_adapter
from model_kit.sensitive_model import HIDDEN, SHARPNESS, save_sensitive_model, sensitive_tensors
from safetensors.torch import save_file

RANK = 4
LORA = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8")
"""vLLM's options for them."""
SHAPES = dict.fromkeys(MODULES, (HIDDEN, HIDDEN))


def adapter_in(folder: Path, seed: int, rank: int = RANK) -> str:
    return save_adapter(folder, seed, rank=rank, shapes=SHAPES, target_modules=list(MODULES))


def model_with(folder: Path, adapter: str) -> str:
    """The sensitive model with an adapter in its weights, for our own engine; returns its path."""
    path = save_sensitive_model(folder, heads=4)
    save_file(merged(sensitive_tensors(1, SHARPNESS), adapter), folder / "model.safetensors")
    return path
