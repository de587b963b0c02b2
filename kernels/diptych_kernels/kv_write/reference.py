"""kv_layer[blocks[t], :, offsets[t]] = keys_values[t] / kv_scale."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FLOAT8: Final = torch.float8_e4m3fn
FLOAT8_MAX: Final = 448.0
"""Larger numbers are stored as this one; the format has no infinity."""


def kv_write(
    keys_values: Tensor, kv_layer: Tensor, blocks: Tensor, offsets: Tensor, kv_scale: float = 1.0
) -> None:
    """As `diptych_kernels.kv_write.kv_write`."""
    if kv_layer.dtype is FLOAT8:
        scaled = keys_values.float() / kv_scale
        keys_values = scaled.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    kv_layer[blocks, :, offsets] = keys_values.to(kv_layer.dtype)
