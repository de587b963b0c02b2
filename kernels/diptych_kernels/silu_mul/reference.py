"""y = silu(gate) * up, with silu(x) = x / (1 + exp(-x))."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`gate_up` [tokens, 2 n] holds the gate in its first half -> [tokens, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
