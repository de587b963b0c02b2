"""The layout of the KV cache that kernels for CPUs expect."""

from __future__ import annotations

import torch
from torch import Tensor


def is_known(kv_layer: Tensor) -> bool:
    """Whether kernels support a layer [num_blocks, 2, block_size, kv_heads, head_dim].

    It must have float32 or bfloat16 numbers, and each block's part of it must be contiguous.
    """
    block_size, kv_heads, head_dim = kv_layer.shape[2:]
    token = kv_heads * head_dim
    return kv_layer.dtype in (torch.float32, torch.bfloat16) and kv_layer.stride()[1:] == (
        block_size * token,
        token,
        head_dim,
        1,
    )
