"""What kernels for CPUs expect of the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor


def is_known(kv_layer: Tensor) -> bool:
    """Whether kernels can work on a layer [num_blocks, 2, block_size, kv_heads, head_dim].

    It must be of float32 or bfloat16 numbers, each block's share of it contiguous.
    """
    block_size, kv_heads, head_dim = kv_layer.shape[2:]
    token = kv_heads * head_dim
    return kv_layer.dtype in (torch.float32, torch.bfloat16) and kv_layer.stride()[1:] == (
        block_size * token,
        token,
        head_dim,
        1,
    )
