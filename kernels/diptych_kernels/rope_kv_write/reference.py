"""Rotate a step's queries and keys, and store its keys and values in the cache."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.kv_write.reference import kv_write
from diptych_kernels.rope.reference import rotate_


def rope_kv_write(
    heads: Tensor, rotations: Tensor, kv_layer: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """Rotate the query heads in place; store the rotated keys and the values.

    heads: [tokens, query_heads + 2 kv_heads, head_dim], contiguous: the queries, then the keys,
        then the values. What the key heads hold afterwards is not defined.
    rotations: [tokens, 1, head_dim / 2, 2] float32, as `rotate_` takes them.
    kv_layer, blocks, offsets: as `kv_write` takes them.
    """
    kv_heads = kv_layer.shape[3]
    rotate_(heads[:, :-kv_heads], rotations)
    keys_values = heads[:, -2 * kv_heads :].view(len(heads), 2, kv_heads, -1)
    kv_write(keys_values, kv_layer, blocks, offsets)
