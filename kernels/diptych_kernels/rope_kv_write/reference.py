"""Rotate a step's queries and keys, and store its keys and values in the cache."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.kv_write.reference import kv_write
from diptych_kernels.rope.reference import rotate_


def rope_kv_write(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    kv_scale: float = 1.0,
) -> None:
    """As `diptych_kernels.rope_kv_write.rope_kv_write`."""
    kv_heads = kv_layer.shape[3]
    rotate_(heads[:, :-kv_heads], rotations)
    keys_values = heads[:, -2 * kv_heads :].view(len(heads), 2, kv_heads, -1)
    kv_write(keys_values, kv_layer, blocks, offsets, kv_scale)
