"""Attention of a mixed batch (prefill chunks and decodes) over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from diptych_kernels.paged_attention import cpu, reference
from diptych_kernels.paged_attention.metadata import AttentionMetadata

__all__ = ["AttentionMetadata", "paged_attention"]


def paged_attention(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    kv_scale: float = 1.0,
    *,
    may_round: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend from the step's new tokens, whose own keys and values are in the cache already.

    queries: [tokens, heads, head_dim]; any strides with a contiguous last dimension.
    kv_layer: [num_blocks, 2, block_size, kv_heads, head_dim], a strided view; of the queries'
        dtype, of 8-bit floats or, on a CPU, of bfloat16.
    kv_scale: as `kv_write` takes it.
    sinks: [heads], the score of one more key, which every token sees and which has no value.
    softcap: scores become softcap tanh(score / softcap); 0: they stay as they are.
    may_round: chunks of prompts may be computed in bfloat16 if that is faster.
    Returns [tokens, heads, head_dim]; heads is a multiple of kv_heads.
    """
    if queries.is_cuda:
        from diptych_kernels.paged_attention import triton

        return triton.paged_attention(queries, kv_layer, metadata, kv_scale, sinks, softcap)
    if cpu.fits(queries, kv_layer):
        return cpu.paged_attention(
            queries, kv_layer, metadata, may_round=may_round, sinks=sinks, softcap=softcap
        )
    return reference.paged_attention(queries, kv_layer, metadata, kv_scale, sinks, softcap)
