"""kv_layer[blocks[t], :, offsets[t]] = keys_values[t]."""

from __future__ import annotations

from torch import Tensor


def kv_write(keys_values: Tensor, kv_layer: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Store the keys and values of new tokens in their slots of one layer's cache.

    keys_values: [tokens, 2, kv_heads, head_dim], keys first; any strides.
    kv_layer: [num_blocks, 2, block_size, kv_heads, head_dim], a strided view.
    blocks, offsets: [tokens] int64, each token's block and its place in that block; no two tokens
        share a slot.
    """
    kv_layer[blocks, :, offsets] = keys_values
