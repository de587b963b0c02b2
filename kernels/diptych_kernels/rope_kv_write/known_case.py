"""The test case for the kernel for rotation and cache write."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.kernel import Kernel
from diptych_kernels.rope_kv_write import reference
from diptych_kernels.rope_kv_write.calls import call
from diptych_kernels.trust import KnownCase, Results, random_values

HEADS, KV_HEADS, EPS = 4, 2, 1e-5


def _results(kernel: Kernel) -> Results:
    """Into a float32 cache, then into a bfloat16 one."""
    tokens, head_dim = 5, 24
    bias = random_values((HEADS + 2 * KV_HEADS) * head_dim)
    norms = random_values(2, head_dim)
    angles = random_values(tokens, 1, head_dim // 2)
    rotations = torch.stack([angles.cos(), angles.sin()], -1)
    blocks, offsets = torch.tensor([2, 0, 0, 1, 2]), torch.tensor([3, 0, 1, 2, 0])
    made: list[list[Tensor]] = []
    for uses_kernel in (True, False):
        mine: list[Tensor] = []
        for dtype in (torch.float32, torch.bfloat16):
            heads = random_values(tokens, HEADS + 2 * KV_HEADS, head_dim)
            cache = torch.zeros(3, 2, 4, KV_HEADS, head_dim, dtype=dtype)
            where = heads, rotations, cache, blocks, offsets
            if uses_kernel:
                _, arguments = call(*where, bias, norms[0], norms[1], EPS)
                kernel.run(arguments, 1)
            else:
                reference.rope_kv_write(*where, 1.0, bias, norms[0], norms[1], EPS)
            mine += [heads[:, :HEADS].flatten(), cache.float().flatten()]
        made.append(mine)
    return torch.cat(made[0]), torch.cat(made[1])


CASE = KnownCase("rope_kv_write", _results, tolerance=1e-3)
"""The tolerance permits a rounding to the neighbouring bfloat16."""
