"""The rotations of RoPE for every position, stretched as the model's rule says.

Rotations also scale: products of queries and keys grow with the square of a rotation's magnitude,
so that every kernel of attention, which divides by sqrt(head_dim), computes any other scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from diptych_frontend.model_files.model_config import ModelConfig
from diptych_frontend.model_files.rope_scaling import (
    Divided,
    LinearScaling,
    Llama3,
    LongRope,
    RopeScaling,
    Yarn,
)


@dataclass(slots=True, frozen=True)
class Rotation:
    """The RoPE that some of a model's layers have."""

    theta: float | None
    """The base of the frequencies; None: nothing is rotated."""
    scaling: RopeScaling | None


def rotation_of(config: ModelConfig, layer: int) -> Rotation:
    """Return the RoPE of a layer."""
    if layer in config.unrotated_layers:
        return Rotation(None, None)
    if config.window_rope_theta is not None and config.window_of(layer) is not None:
        return Rotation(config.window_rope_theta, None)
    return Rotation(config.rope_theta, config.rope_scaling)


def rotation_table(
    config: ModelConfig, rotation: Rotation, max_positions: int, device: torch.device
) -> Tensor:
    """Return (cos, sin) of every position and frequency: [max_positions, 1, head_dim / 2, 2]
    float32. The last pairs of a head, which are not rotated, have (1, 0)."""
    pairs = config.head_dim // 2
    table = torch.tensor([1.0, 0.0]).repeat(max_positions, 1, pairs, 1)
    if rotation.theta is not None:
        frequencies = _frequencies(config.rotated, rotation.theta, rotation.scaling, max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        rotated = torch.stack((angles.cos(), angles.sin()), dim=-1).unsqueeze(1)
        if rotation.scaling is not None:
            rotated *= rotation.scaling.magnitude
        table[:, :, : config.rotated // 2] = rotated
    if config.attention_scale is not None:
        table *= math.sqrt(config.attention_scale * math.sqrt(config.head_dim))
    return table.to(device)


def _frequencies(dim: int, theta: float, scaling: RopeScaling | None, max_positions: int) -> Tensor:
    """Radians per position for each pair of `dim` dimensions: [dim / 2] float32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / theta**exponents
    match scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Divided(divisors=divisors):
            return frequencies / torch.tensor(divisors)
        case LongRope() as rule:
            is_long = max_positions > rule.original_max_position_embeddings
            return frequencies / torch.tensor(rule.long_factor if is_long else rule.short_factor)
        case Llama3() as rule:
            kept = _kept_by_llama3(rule, frequencies)
        case Yarn() as rule:
            kept = _kept_by_yarn(rule, dim, theta)
        case other:
            assert_never(other)
    return frequencies * kept + frequencies / rule.factor * (1.0 - kept)


def _kept_by_llama3(rule: Llama3, frequencies: Tensor) -> Tensor:
    """How far each frequency stays as it is, 0 to 1: it grows linearly with the number of turns
    that the frequency makes in training."""
    turns = rule.original_max_position_embeddings * frequencies / (2 * math.pi)
    band = rule.high_freq_factor - rule.low_freq_factor
    return ((turns - rule.low_freq_factor) / band).clamp(0.0, 1.0)


def _kept_by_yarn(rule: Yarn, dim: int, theta: float) -> Tensor:
    """How far each frequency stays as it is, 0 to 1: it falls linearly with the frequency's index
    between those of the frequencies that make `beta_fast` and `beta_slow` turns in training."""

    def index_of(turns: float) -> float:
        wavelength = rule.original_max_position_embeddings / (2 * math.pi * turns)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = index_of(rule.beta_fast), index_of(rule.beta_slow)
    if rule.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
