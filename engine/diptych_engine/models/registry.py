"""Architecture -> model class. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from diptych_engine.models.interface import CausalLM
from diptych_engine.models.llama import LlamaModel
from diptych_engine.models.shard import WHOLE, Shard
from diptych_frontend.model_files.model_source import ModelConfig
from diptych_protocol import InvalidRequestError

Builder = Callable[[ModelConfig, int, torch.dtype, torch.device, Shard], CausalLM]

BUILDERS: Final[dict[str, Builder]] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": LlamaModel,
}


def build_model(
    config: ModelConfig,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> CausalLM:
    """Allocate a rank's share of a model, its weights still undefined.

    Raises `InvalidRequestError` for an architecture that nobody has written.
    """
    builder = BUILDERS.get(config.architecture)
    if builder is None:
        raise InvalidRequestError(
            f"model not supported: architecture {config.architecture!r}, "
            f"not one of {', '.join(BUILDERS)}",
            param="model",
        )
    return builder(config, max_positions, dtype, device, shard)
