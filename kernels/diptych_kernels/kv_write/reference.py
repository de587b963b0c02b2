"""kv_layer[blocks[t], :, offsets[t]] = keys_values[t] / kv_scale."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.kv_write.float8 import FLOAT8, FLOAT8_MAX


def kv_write(
    keys_values: Tensor, kv_layer: Tensor, blocks: Tensor, offsets: Tensor, kv_scale: float = 1.0
) -> None:
    """As `diptych_kernels.kv_write.kv_write`."""
    if kv_layer.dtype is FLOAT8:
        scaled = keys_values.float() / kv_scale
        keys_values = scaled.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    kv_layer[blocks, :, offsets] = keys_values.to(kv_layer.dtype)
