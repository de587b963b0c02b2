"""Rotate a step's queries and keys, and store its keys and values in the cache."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.kv_write.reference import kv_write
from diptych_kernels.rms_norm import rms_norm
from diptych_kernels.rope.reference import rotate_


def rope_kv_write(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    kv_scale: float = 1.0,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """As `diptych_kernels.rope_kv_write.rope_kv_write`."""
    kv_heads = kv_layer.shape[3]
    add_and_normalise_(heads, kv_heads, bias, query_norm, key_norm, eps)
    rotate_(heads[:, :-kv_heads], rotations)
    keys_values = heads[:, -2 * kv_heads :].view(len(heads), 2, kv_heads, -1)
    kv_write(keys_values, kv_layer, blocks, offsets, kv_scale)


def add_and_normalise_(
    heads: Tensor,
    kv_heads: int,
    bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    """Add the bias and normalise the heads, before the rotation."""
    if bias is not None:
        heads.flatten(1).add_(bias)
    if query_norm is not None:
        queries = heads[:, : -2 * kv_heads]
        queries.copy_(rms_norm(queries, query_norm, eps))
    if key_norm is not None:
        keys = heads[:, -2 * kv_heads : -kv_heads]
        keys.copy_(rms_norm(keys, key_norm, eps))
