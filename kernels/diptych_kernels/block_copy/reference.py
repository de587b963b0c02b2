"""staging[i] = kv_cache[block_ids[i]], and back."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_blocks(kv_cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """As `diptych_kernels.block_copy.gather_blocks`."""
    torch.index_select(kv_cache, 0, block_ids, out=staging)


def scatter_blocks(staging: Tensor, kv_cache: Tensor, block_ids: Tensor) -> None:
    """As `diptych_kernels.block_copy.scatter_blocks`."""
    kv_cache[block_ids] = staging
