"""Rotate a step's queries and keys, and store its keys and values in the cache.

Rotary embedding has the interleaved layout here. The pair (2i, 2i+1) of a head is one complex
number, multiplied by cos(p f_i) + i sin(p f_i) for position p. Models published in the half-split
layout (pairs i and i + head_dim / 2) have the rows of their query and key projections reordered
when they are loaded; scores depend only on pairs, so attention is the same, and the rotation is a
single multiplication in place.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from diptych_kernels.rms_norm import rms_norm

FLOAT8: Final = torch.float8_e4m3fn
FLOAT8_MAX: Final = 448.0
"""Larger numbers are stored as this one; the format has no infinity."""


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


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotate query and key heads in place.

    heads: [tokens, heads, head_dim], last dimension contiguous, any other strides.
    rotations: [tokens, 1, head_dim / 2, 2] float32, the (cos, sin) of each token's position.
    """
    factors = torch.view_as_complex(rotations)
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype is torch.float32:
        torch.view_as_complex(pairs).mul_(factors)
    else:
        rotated = torch.view_as_complex(pairs.float()).mul_(factors)
        pairs.copy_(torch.view_as_real(rotated))


def kv_write(
    keys_values: Tensor, kv_layer: Tensor, blocks: Tensor, offsets: Tensor, kv_scale: float = 1.0
) -> None:
    """Store the keys and values of new tokens in their slots of one layer's cache.

    keys_values: [tokens, 2, kv_heads, head_dim], keys first; any strides, but a contiguous last
        dimension.
    kv_layer: [num_blocks, 2, block_size, kv_heads, head_dim], a strided view; keeps them in its own
        dtype.
    blocks, offsets: [tokens] int64, each token's block and its place in that block; no two tokens
        share a slot.
    kv_scale: what an 8-bit cache's numbers are multiplied by to give keys and values; caches of
        other dtypes keep them as they are.
    """
    if kv_layer.dtype is FLOAT8:
        scaled = keys_values.float() / kv_scale
        keys_values = scaled.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    kv_layer[blocks, :, offsets] = keys_values.to(kv_layer.dtype)
