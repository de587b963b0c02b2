"""softmax(q k^T / sqrt(head_dim)) v, each query over the keys of its own sequence up to itself.

Keys and values are gathered block by block into dense tensors (about 2 x 2 x context bytes moved),
decodes of similar length together, and given to torch's fused attention. Slots past a sequence's
end are masked, so they need only be finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych_kernels.kv_write.reference import FLOAT8
from diptych_kernels.paged_attention.metadata import AttentionMetadata, PrefillChunk


def paged_attention(
    queries: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, kv_scale: float = 1.0
) -> Tensor:
    """As `diptych_kernels.paged_attention.paged_attention`."""
    if kv_layer.dtype is FLOAT8:
        kv_layer = kv_layer.to(queries.dtype) * kv_scale
    groups, chunks = metadata.decode_groups, metadata.prefill_chunks
    if len(groups) == 1 and not chunks:
        return _decode(queries, kv_layer, groups[0].blocks, groups[0].longest, groups[0].mask)
    attended = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for group in groups:
        attended[group.rows] = _decode(
            queries[group.rows], kv_layer, group.blocks, group.longest, group.mask
        )
    for chunk in chunks:
        attended[chunk.rows] = prefill(queries[chunk.rows], kv_layer, chunk)
    return attended


def _decode(
    queries: Tensor, kv_layer: Tensor, blocks: Tensor, longest: int, mask: Tensor | None
) -> Tensor:
    """One query per sequence: [sequences, heads, head_dim] -> the same.

    The heads that share keys are passed as that many queries of one head: they see the same keys,
    and larger products are faster.
    """
    size, heads, head_dim = queries.shape
    keys, values = _gather(kv_layer, blocks, size, longest, queries.dtype)
    grouped = queries.view(size, keys.shape[1], -1, head_dim)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return attended.reshape(size, heads, head_dim)


def prefill(queries: Tensor, kv_layer: Tensor, chunk: PrefillChunk) -> Tensor:
    """Several queries of one sequence: [tokens, heads, head_dim] -> the same."""
    keys, values = _gather(kv_layer, chunk.blocks, 1, chunk.length, queries.dtype)
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def _gather(
    kv_layer: Tensor, blocks: Tensor, size: int, longest: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of `size` sequences, each [size, kv_heads, longest, head_dim]."""
    kv_heads, head_dim = kv_layer.shape[3:]
    dense = (
        half.index_select(0, blocks)
        .to(dtype)
        .view(size, -1, kv_heads, head_dim)[:, :longest]
        .transpose(1, 2)
        for half in kv_layer.unbind(1)
    )
    keys, values = dense
    return keys, values
