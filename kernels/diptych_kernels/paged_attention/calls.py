"""Arguments of the kernels for attention, and the sizes of heads that they support."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.arguments import ChunkAttention, DecodeAttention, places_of
from diptych_kernels.native.prefill_chunk import ChunkNumbers
from diptych_kernels.paged_attention.metadata import AttentionMetadata

FLOAT = 4
"""Size in bytes."""
WIDTH = 32
"""The kernel for chunks supports heads whose size is a multiple of this."""
[CACHE] = places_of(DecodeAttention, "cache")
"""The position of the address of the layer's keys and values in a table's row, also for chunks."""
COMMON_DIMS = frozenset({64, 128})
"""Sizes of heads with a kernel of their own, which is a quarter faster."""


def fills_vectors(head_dim: int) -> bool:
    """Whether heads have a size that all kernels but the first support."""
    return head_dim % WIDTH == 0


def number_of(head_dim: int) -> int:
    """Return the number of the kernel for decodes with heads of this size; 0 supports any."""
    return head_dim if head_dim in COMMON_DIMS else 0


def decode_arguments(
    queries: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, attended: Tensor
) -> DecodeAttention:
    """Return the arguments of either kernel for all decodes of a step."""
    _, heads, head_dim = queries.shape
    threads = torch.get_num_threads()
    return DecodeAttention(
        queries.data_ptr(),
        queries.stride(0) * FLOAT,
        kv_layer.data_ptr(),
        kv_layer.stride(0) * kv_layer.itemsize,
        attended.data_ptr(),
        kv_layer.itemsize,
        *metadata.decode_batch.arguments(heads, kv_layer.shape[3], head_dim, threads),
    )


def chunk_arguments(
    queries: Tensor, kv_layer: Tensor, own: ChunkNumbers, attended: Tensor
) -> ChunkAttention:
    """Return the arguments of either kernel for a chunk."""
    _, heads, head_dim = queries.shape
    threads, first = torch.get_num_threads(), own.rows.start
    return ChunkAttention(
        queries.data_ptr() + first * queries.stride(0) * FLOAT,
        queries.stride(0) * FLOAT,
        kv_layer.data_ptr(),
        kv_layer.stride(0) * kv_layer.itemsize,
        attended.data_ptr() + first * attended.stride(0) * FLOAT,
        kv_layer.itemsize,
        *own.arguments(heads, kv_layer.shape[3], head_dim, threads),
    )
