"""Bias, norms of heads, rotation and cache write in one call, for which torch needs seven or more
small operators."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.arguments import RopeKvWrite, places_of
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of
from diptych_kernels.rope_kv_write import reference
from diptych_kernels.trust import KnownCase, Results, is_trusted, random_values

CACHE, BIAS, QUERY_NORM, KEY_NORM = places_of(
    RopeKvWrite, "cache", "bias", "query_norm", "key_norm"
)
"""Positions, in a table's row, of the addresses that differ from layer to layer."""
MIN_TOKENS_TO_SHARE = 16
"""With fewer tokens, one thread is done before a second one has begun."""
HEADS, KV_HEADS, EPS = 4, 2, 1e-5


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


def call(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Call:
    """Return the call. For another layer, replace these addresses by that layer's."""
    tokens, num_heads, head_dim = heads.shape
    arguments = RopeKvWrite(
        heads=heads.data_ptr(),
        rotations=rotations.data_ptr(),
        cache=kv_layer.data_ptr(),
        blocks=blocks.data_ptr(),
        offsets=offsets.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        query_norm=0 if query_norm is None else query_norm.data_ptr(),
        key_norm=0 if key_norm is None else key_norm.data_ptr(),
        eps=bits_of(eps),
        tokens=tokens,
        num_heads=num_heads,
        kv_heads=kv_layer.shape[3],
        head_dim=head_dim,
        block_size=kv_layer.shape[2],
        block_stride=kv_layer.stride(0) * kv_layer.itemsize,
        item=kv_layer.itemsize,
    )
    return kernel_of("rope_kv_write", 0), arguments


def fits(heads: Tensor, kv_layer: Tensor) -> bool:
    """Whether there is a kernel for these types and this layout."""
    return (
        heads.dtype is torch.float32
        and heads.is_contiguous()
        and is_known(kv_layer)
        and is_trusted(CASE, 0)
    )


def rope_kv_write(
    heads: Tensor,
    rotations: Tensor,
    kv_layer: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    """As `diptych_kernels.rope_kv_write.rope_kv_write`, for what `fits`."""
    own, arguments = call(
        heads, rotations, kv_layer, blocks, offsets, bias, query_norm, key_norm, eps
    )
    own.run(arguments, torch.get_num_threads() if heads.shape[0] >= MIN_TOKENS_TO_SHARE else 1)


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
