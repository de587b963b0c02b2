"""How an MLP combines its gate and its up projection."""

from __future__ import annotations

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych_frontend.model_files.family_spec import Gate
from diptych_kernels.silu_mul import silu_mul

LIMIT = 7.0
SLOPE = 1.702
"""The constants of gpt-oss."""


def gated(gate_up: Tensor, kind: Gate) -> Tensor:
    """`gate_up` [tokens, 2 n] holds the gate in its first half -> [tokens, n]."""
    if kind == "silu":
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if kind == "clamped":
        gate = gate.clamp(max=LIMIT)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(up.clamp(-LIMIT, LIMIT).add_(1.0))
    assert_never(kind)
