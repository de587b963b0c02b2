"""The rotations of RoPE for every position, stretched as the model's rule says."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from diptych_frontend.model_files.model_config import ModelConfig
from diptych_frontend.model_files.rope_scaling import Divided, LinearScaling, Llama3, Yarn


def rotation_table(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """Return (cos, sin) of every position and frequency: [max_positions, 1, head_dim / 2, 2]
    float32."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), _frequencies(config))
    table = torch.stack((angles.cos(), angles.sin()), dim=-1).unsqueeze(1)
    if config.rope_scaling is not None:
        table *= config.rope_scaling.magnitude
    return table.to(device)


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position for each pair of a head: [head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Divided(divisors=divisors):
            return frequencies / torch.tensor(divisors)
        case Llama3() as rule:
            kept = _kept_by_llama3(rule, frequencies)
        case Yarn() as rule:
            kept = _kept_by_yarn(rule, config)
        case other:
            assert_never(other)
    return frequencies * kept + frequencies / rule.factor * (1.0 - kept)


def _kept_by_llama3(rule: Llama3, frequencies: Tensor) -> Tensor:
    """How far each frequency stays as it is, 0 to 1: it grows linearly with the number of turns
    that the frequency makes in training."""
    turns = rule.original_max_position_embeddings * frequencies / (2 * math.pi)
    band = rule.high_freq_factor - rule.low_freq_factor
    return ((turns - rule.low_freq_factor) / band).clamp(0.0, 1.0)


def _kept_by_yarn(rule: Yarn, config: ModelConfig) -> Tensor:
    """How far each frequency stays as it is, 0 to 1: it falls linearly with the frequency's index
    between those of the frequencies that make `beta_fast` and `beta_slow` turns in training."""
    dim = config.head_dim

    def index_of(turns: float) -> float:
        wavelength = rule.original_max_position_embeddings / (2 * math.pi * turns)
        return dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = index_of(rule.beta_fast), index_of(rule.beta_slow)
    if rule.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
