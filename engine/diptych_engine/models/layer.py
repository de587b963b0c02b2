"""What one layer of a Llama-like model holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych_engine.models.linear import Linear


@dataclass(slots=True, frozen=True)
class LayerWeights:
    """H query heads, K key-value heads, D head_dim; of the heads, those of this rank."""

    attention_norm: Tensor
    qkv: Linear
    """[hidden, (H + 2 K) D]: query heads, key heads, value heads."""
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    """[H D, hidden]."""
    mlp_norm: Tensor
    gate_up: Linear
    """[hidden, 2 intermediate]."""
    down: Linear
    """[intermediate, hidden]."""
