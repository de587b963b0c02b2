"""Attention that reads keys and values in place.

Decodes: the keys of a sequence are cut into partitions of a fixed size, and the partitions of all
sequences are divided among the threads. A thread computes all heads of a token together, because
they are adjacent in the cache, and heads that share keys reuse what was read. Each partition yields
a maximum, a sum and a weighted sum of values for each head; when all threads are done these are
merged (the split of flash-decoding).

Chunks of prompts, which are bound by arithmetic: keys are transposed first, once for all queries.
Then each thread computes 16 queries that share keys over their contexts, partition by partition,
with a running maximum (flash attention). The processor's matrix unit, if it has one, does this in
bfloat16 for models that round their activations anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.kernel import Call, Kernel, kernel_of
from diptych_kernels.native.layout import is_known
from diptych_kernels.paged_attention import reference
from diptych_kernels.paged_attention.calls import (
    chunk_arguments,
    decode_arguments,
    fills_vectors,
    number_of,
)
from diptych_kernels.paged_attention.known_cases import (
    AMX_CHUNK,
    BF16_DECODES,
    CHUNK,
    DECODES,
)
from diptych_kernels.paged_attention.metadata import AttentionMetadata
from diptych_kernels.trust import is_trusted


def fits(queries: Tensor, kv_layer: Tensor) -> bool:
    """Whether there is a kernel for these types and this layout."""
    return (
        queries.dtype is torch.float32
        and queries.stride()[1:] == (queries.shape[2], 1)
        and is_known(kv_layer)
        and has_decodes(queries.shape[2])
    )


def paged_attention(
    queries: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, *, may_round: bool
) -> Tensor:
    """As `diptych_kernels.paged_attention.paged_attention`, for what `fits`."""
    attended = torch.empty(queries.shape)
    threads = torch.get_num_threads()
    if has_kernels(queries.shape[2]):
        for kernel, arguments in calls(queries, kv_layer, metadata, attended, may_round=may_round):
            kernel.run(arguments, threads)
        return attended
    if metadata.num_decodes:
        kernel, arguments = _decode_call(queries, kv_layer, metadata, attended)
        kernel.run(arguments, threads)
    for chunk in metadata.prefill_chunks:
        attended[chunk.rows] = reference.prefill(queries[chunk.rows], kv_layer, chunk)
    return attended


@remembered
def has_decodes(head_dim: int) -> bool:
    """Whether there is a kernel for decodes, without which none is used."""
    return is_trusted(DECODES, number_of(head_dim))


@remembered
def has_kernels(head_dim: int) -> bool:
    """Whether there is a kernel for chunks of prompts too."""
    return fills_vectors(head_dim) and is_trusted(CHUNK, head_dim)


def calls(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    attended: Tensor,
    *,
    may_round: bool,
) -> list[Call]:
    """Return the calls that compute the attention of a step, for what `fits` and sizes that have
    kernels.

    For another layer, replace argument `calls.CACHE` by that layer's address.
    """
    found = [_decode_call(queries, kv_layer, metadata, attended)] if metadata.num_decodes else []
    if metadata.num_decodes < len(metadata.context_lens):
        head_dim = queries.shape[2]
        in_tiles = may_round and is_trusted(AMX_CHUNK, head_dim)
        kernel = chunk_kernel(head_dim) if in_tiles else prefill_kernel(head_dim)
        for own in metadata.chunk_numbers:
            found.append((kernel, chunk_arguments(queries, kv_layer, own, attended)))
    return found


def _decode_call(
    queries: Tensor, kv_layer: Tensor, metadata: AttentionMetadata, attended: Tensor
) -> Call:
    arguments = decode_arguments(queries, kv_layer, metadata, attended)
    return decode_kernel(queries.shape[2], kv_layer.dtype), arguments


@remembered
def decode_kernel(head_dim: int, kv_dtype: torch.dtype) -> Kernel:
    """Return the kernel for decodes; it is loaded at first use."""
    number = number_of(head_dim)
    may_pair = kv_dtype is torch.bfloat16 and fills_vectors(head_dim)
    in_pairs = may_pair and is_trusted(BF16_DECODES, number)
    return kernel_of("bf16_decode_attention" if in_pairs else "decode_attention", number)


@remembered
def prefill_kernel(head_dim: int) -> Kernel:
    """Return the kernel for chunks, for heads whose size is a multiple of `calls.WIDTH`."""
    return kernel_of("prefill_attention", head_dim)


@remembered
def chunk_kernel(head_dim: int) -> Kernel:
    """Return the kernel for chunks that uses the matrix unit."""
    return kernel_of("amx_attention", head_dim)
