"""softmax(q k^T / sqrt(head_dim)) v, each query over the keys of its own sequence up to itself.

Keys and values are gathered block by block into dense tensors (about 2 x 2 x context bytes moved),
decodes of similar length together, and given to torch's fused attention. Slots past a sequence's
end are masked, so they need only be finite.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych_kernels.paged_attention.metadata import AttentionMetadata, DecodeGroup, PrefillChunk
from diptych_kernels.rope_kv_write.reference import FLOAT8


def paged_attention(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    kv_scale: float = 1.0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """As `diptych_kernels.paged_attention.paged_attention`."""
    if kv_layer.dtype is FLOAT8:
        kv_layer = kv_layer.to(queries.dtype) * kv_scale
    groups, chunks = metadata.decode_groups, metadata.prefill_chunks
    if len(groups) == 1 and not chunks:
        return _decode(queries, kv_layer, groups[0], sinks, softcap)
    attended = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for group in groups:
        attended[group.rows] = _decode(queries[group.rows], kv_layer, group, sinks, softcap)
    for chunk in chunks:
        attended[chunk.rows] = prefill(queries[chunk.rows], kv_layer, chunk, sinks, softcap)
    return attended


def _decode(
    queries: Tensor, kv_layer: Tensor, group: DecodeGroup, sinks: Tensor | None, softcap: float
) -> Tensor:
    """One query per sequence: [sequences, heads, head_dim] -> the same.

    The heads that share keys are passed as that many queries of one head: they see the same keys,
    and larger products are faster.
    """
    size, heads, head_dim = queries.shape
    keys, values = _gather(kv_layer, group.blocks, size, group.longest, queries.dtype)
    grouped = queries.view(size, keys.shape[1], -1, head_dim)
    if sinks is None and not softcap:
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    else:
        of_queries = None if sinks is None else sinks.view(keys.shape[1], -1)
        attended = _with_more(
            grouped, keys, values, group.mask, is_causal=False, sinks=of_queries, softcap=softcap
        )
    return attended.reshape(size, heads, head_dim)


def prefill(
    queries: Tensor, kv_layer: Tensor, chunk: PrefillChunk, sinks: Tensor | None, softcap: float
) -> Tensor:
    """Several queries of one sequence: [tokens, heads, head_dim] -> the same."""
    keys, values = _gather(kv_layer, chunk.blocks, 1, chunk.length, queries.dtype)
    own = queries.transpose(0, 1).unsqueeze(0)
    if sinks is not None or softcap:
        sharing = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(sharing, 1) for each in (keys, values))
        of_heads = None if sinks is None else sinks[:, None]
        attended = _with_more(
            own, keys, values, chunk.mask, is_causal=chunk.mask is None, sinks=of_heads,
            softcap=softcap,
        )  # fmt: skip
        return attended.squeeze(0).transpose(0, 1)
    attended = F.scaled_dot_product_attention(
        own, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    return attended.squeeze(0).transpose(0, 1)


def _with_more(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    """Attention with sinks or a soft cap. A sink takes its share of each softmax and has no value,
    so the share is taken off what the other keys yield. sinks: of each head, or of each head and
    query.

    Without a cap this is the operator behind torch's fused attention, which alone returns the
    logarithm of the sum of exponentials too.
    """
    hidden = None
    if mask is not None:
        hidden = torch.zeros_like(mask, dtype=queries.dtype).masked_fill_(~mask, -torch.inf)
    if softcap:
        scores = queries.float() @ keys.float().mT / math.sqrt(queries.shape[-1])
        scores = scores.div_(softcap).tanh_().mul_(softcap)
        if is_causal:
            hidden = scores.new_full(scores.shape[-2:], -torch.inf).triu_(1)
        scores = scores if hidden is None else scores.add_(hidden)
        log_sums = scores.logsumexp(-1)
        attended = scores.sub_(log_sums[..., None]).exp_().to(values.dtype) @ values
    else:
        attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, is_causal=is_causal, attn_mask=hidden
        )
    if sinks is None:
        return attended
    share = torch.sigmoid(log_sums - sinks)
    weighted: Tensor = attended * share[..., None].to(attended.dtype)
    return weighted


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
