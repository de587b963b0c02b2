"""Attention that reads keys and values where they stand.

Decodes: the keys of a sequence are cut into partitions of a fixed size, and the partitions of all
sequences are dealt out to the threads. A thread takes all heads of a token together, because they
lie side by side in the cache, and the heads that share keys read them while they are at hand. Each
partition yields a maximum, a sum and a weighted sum of values for each head; when all threads are
done these are merged (the split of flash-decoding).

Chunks of prompts, which are bound by arithmetic: keys are transposed first, once for all queries.
Then each thread takes 16 queries that share keys through their contexts, partition by partition,
with a running maximum (flash attention).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from diptych_kernels.native.kernel import Kernel
from diptych_kernels.native.layout import is_known
from diptych_kernels.paged_attention import reference
from diptych_kernels.paged_attention.metadata import AttentionMetadata

FLOAT = 4
"""Bytes."""
WIDTH = 32
"""Heads of the kernel for chunks have a multiple of so many dimensions."""
COMMON_DIMS = frozenset({64, 128})
"""Sizes of heads that have a kernel of their own, which is a quarter faster."""


def fits(queries: Tensor, kv_layer: Tensor) -> bool:
    """Whether the kernel knows these types and this layout."""
    return (
        queries.dtype is torch.float32
        and queries.stride()[1:] == (queries.shape[2], 1)
        and is_known(kv_layer)
    )


def paged_attention(queries: Tensor, kv_layer: Tensor, metadata: AttentionMetadata) -> Tensor:
    """As `diptych_kernels.paged_attention.paged_attention`, for what `fits`."""
    attended = torch.empty(queries.shape)
    if metadata.num_decodes:
        _, heads, head_dim = queries.shape
        threads = torch.get_num_threads()
        numbers = metadata.decode_batch.numbers(heads, kv_layer.shape[3], head_dim, threads)
        numbers[0] = queries.data_ptr()
        numbers[1] = queries.stride(0) * FLOAT
        numbers[2] = kv_layer.data_ptr()
        numbers[3] = kv_layer.stride(0) * FLOAT
        numbers[4] = attended.data_ptr()
        decode_kernel(head_dim).run(numbers, threads)
    if metadata.num_decodes < len(metadata.context_lens):
        _prefill(queries, kv_layer, metadata, attended)
    return attended


def _prefill(
    queries: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, attended: Tensor
) -> None:
    """Chunk by chunk; sizes of heads that fill no vectors go to the reference."""
    _, heads, head_dim = queries.shape
    if head_dim % WIDTH:
        for chunk in metadata.prefill_chunks:
            attended[chunk.rows] = reference.prefill(queries[chunk.rows], kv_layer, chunk)
        return
    threads = torch.get_num_threads()
    for own in metadata.chunk_numbers:
        numbers = own.numbers(heads, kv_layer.shape[3], head_dim, threads)
        first = own.rows.start
        numbers[0] = queries.data_ptr() + first * queries.stride(0) * FLOAT
        numbers[1] = queries.stride(0) * FLOAT
        numbers[2] = kv_layer.data_ptr()
        numbers[3] = kv_layer.stride(0) * FLOAT
        numbers[4] = attended.data_ptr() + first * attended.stride(0) * FLOAT
        prefill_kernel(head_dim).run(numbers, threads)


def decode_kernel(head_dim: int) -> Kernel:
    """Compiled when it is asked for the first time."""
    return _compiled(head_dim if head_dim in COMMON_DIMS else 0)


@cache
def prefill_kernel(head_dim: int) -> Kernel:
    """For heads whose size is a multiple of `WIDTH`."""
    return Kernel("prefill_attention", head_dim)


@cache
def _compiled(head_dim: int) -> Kernel:
    return Kernel("decode_attention", head_dim)
