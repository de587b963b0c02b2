"""The table of rotations that RoPE multiplies with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diptych_frontend.model_files.model_source import ModelConfig
from diptych_protocol import InvalidRequestError


def rotation_table(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """Return (cos, sin) of every position and frequency: [max_positions, 1, head_dim / 2, 2]
    float32."""
    frequencies = _frequencies(config)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).unsqueeze(1).to(device)


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position for each pair of a head: [head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.get("rope_type") != "llama3":
        raise InvalidRequestError(f"model not supported: RoPE scaling {scaling}", param="model")
    return _llama3(
        frequencies,
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        trained_positions=scaling["original_max_position_embeddings"],
    )


def _llama3(
    frequencies: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    trained_positions: float,
) -> Tensor:
    """Llama 3.1's stretch: slow frequencies are divided by `factor`, fast ones kept, the band
    between blended linearly in the number of turns that a frequency makes in training."""
    turns = trained_positions * frequencies / (2 * math.pi)
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / factor * (1.0 - kept)
