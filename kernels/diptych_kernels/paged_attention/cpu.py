"""Attention that reads keys and values in place.

Decodes: the keys of a sequence are cut into partitions of a fixed size, and the partitions of all
sequences are divided among the threads. A thread computes all heads of a token together, because
they are adjacent in the cache, and heads that share keys reuse what was read. Each partition yields
a maximum, a sum and a weighted sum of values for each head; when all threads are done these are
merged (the split of flash-decoding).

Chunks of prompts, which are bound by arithmetic: keys are transposed first, once for all queries.
Then each thread computes 48 queries that share keys over their contexts, partition by partition,
with a running maximum (flash attention). A cache in bfloat16 is multiplied as such, by processors
that do so in pairs, or that have a matrix unit if the model rounds its activations anyway.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.arguments import ChunkAttention, DecodeAttention
from diptych_kernels.native.kernel import Call, Kernel, bits_of, kernel_of
from diptych_kernels.native.prefill_chunk import ChunkNumbers
from diptych_kernels.paged_attention import reference
from diptych_kernels.paged_attention.metadata import AttentionMetadata
from diptych_kernels.rope_kv_write.cpu import is_known
from diptych_kernels.trust import KnownCase, Results, is_trusted, random_values, unwritten

FLOAT = 4
"""Size in bytes."""
WIDTH = 32
"""The kernel for chunks supports heads whose size is a multiple of this."""
COMMON_DIMS = frozenset({64, 128})
"""Sizes of heads with a kernel of their own, which is a quarter faster."""
HEADS, KV_HEADS, BLOCK_SIZE, SOFTCAP = 4, 2, 16, 1.5


def fills_vectors(head_dim: int) -> bool:
    """Whether heads have a size that all kernels but the first support."""
    return head_dim % WIDTH == 0


def number_of(head_dim: int) -> int:
    """Return the number of the kernel for decodes with heads of this size; 0 supports any."""
    return head_dim if head_dim in COMMON_DIMS else 0


def decode_arguments(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    attended: Tensor,
    sinks: Tensor | None,
    softcap: float,
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
        0 if sinks is None else sinks.data_ptr(),
        bits_of(softcap),
        *metadata.decode_batch.arguments(heads, kv_layer.shape[3], head_dim, threads),
    )


def chunk_arguments(
    queries: Tensor,
    kv_layer: Tensor,
    own: ChunkNumbers,
    attended: Tensor,
    sinks: Tensor | None,
    softcap: float,
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
        0 if sinks is None else sinks.data_ptr(),
        bits_of(softcap),
        *own.arguments(heads, kv_layer.shape[3], head_dim, threads),
    )


def fits(queries: Tensor, kv_layer: Tensor) -> bool:
    """Whether there is a kernel for these types and this layout."""
    return (
        queries.dtype is torch.float32
        and queries.stride()[1:] == (queries.shape[2], 1)
        and is_known(kv_layer)
        and has_decodes(queries.shape[2])
    )


def paged_attention(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    *,
    may_round: bool,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    """As `diptych_kernels.paged_attention.paged_attention`, for what `fits`."""
    attended = torch.empty(queries.shape)
    threads = torch.get_num_threads()
    if has_kernels(queries.shape[2]):
        found = calls(
            queries, kv_layer, metadata, attended, may_round=may_round, sinks=sinks, softcap=softcap
        )
        for kernel, arguments in found:
            kernel.run(arguments, threads)
        return attended
    if metadata.num_decodes:
        kernel, arguments = _decode_call(queries, kv_layer, metadata, attended, sinks, softcap)
        kernel.run(arguments, threads)
    for chunk in metadata.prefill_chunks:
        attended[chunk.rows] = reference.prefill(
            queries[chunk.rows], kv_layer, chunk, sinks, softcap
        )
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
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> list[Call]:
    """Return the calls that compute the attention of a step, for what `fits` and sizes that have
    kernels.

    For another layer, replace argument `rope_kv_write.CACHE` by that layer's address.
    """
    found = []
    if metadata.num_decodes:
        found.append(_decode_call(queries, kv_layer, metadata, attended, sinks, softcap))
    if metadata.num_decodes < len(metadata.context_lens):
        kernel = chunk_kernel(queries.shape[2], kv_layer.dtype, may_round)
        for own in metadata.chunk_numbers:
            found.append(
                (kernel, chunk_arguments(queries, kv_layer, own, attended, sinks, softcap))
            )
    return found


def _decode_call(
    queries: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    attended: Tensor,
    sinks: Tensor | None,
    softcap: float,
) -> Call:
    arguments = decode_arguments(queries, kv_layer, metadata, attended, sinks, softcap)
    return decode_kernel(queries.shape[2], kv_layer.dtype), arguments


@remembered
def decode_kernel(head_dim: int, kv_dtype: torch.dtype) -> Kernel:
    """Return the kernel for decodes; it is loaded at first use."""
    number = number_of(head_dim)
    may_pair = kv_dtype is torch.bfloat16 and fills_vectors(head_dim)
    in_pairs = may_pair and is_trusted(BF16_DECODES, number)
    return kernel_of("bf16_decode_attention" if in_pairs else "decode_attention", number)


@remembered
def chunk_kernel(head_dim: int, kv_dtype: torch.dtype, may_round: bool) -> Kernel:
    """Return the kernel for chunks, for heads whose size is a multiple of `WIDTH`."""
    if may_round and is_trusted(AMX_CHUNK, head_dim):
        return kernel_of("amx_attention", head_dim)
    in_pairs = kv_dtype is torch.bfloat16 and is_trusted(BF16_CHUNK, head_dim)
    return kernel_of("bf16_prefill_attention" if in_pairs else "prefill_attention", head_dim)


def _attention(
    contexts: list[tuple[int, int]], head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Queries, a layer of a cache, and what says of which sequences, each (context, new tokens)."""
    lengths, counts = np.array(contexts).T
    num_blocks = -(-lengths // BLOCK_SIZE)
    tables = np.zeros((len(contexts), num_blocks.max()), np.int64)
    ids = np.arange(num_blocks.sum())[::-1]
    for row, end in enumerate(num_blocks.cumsum()):
        own = ids[end - num_blocks[row] : end]
        tables[row, : len(own)] = own
    metadata = AttentionMetadata(
        query_starts=np.concatenate(([0], counts.cumsum())),
        context_lens=lengths,
        block_tables=tables,
        num_decodes=int((counts == 1).sum()),
        block_size=BLOCK_SIZE,
        window=None,
        device=torch.device("cpu"),
    )
    cache = random_values(len(ids), 2, BLOCK_SIZE, KV_HEADS, head_dim).to(dtype)
    return random_values(int(counts.sum()), HEADS, head_dim), cache, metadata


def _decodes(
    kernel: Kernel, dtype: torch.dtype, sinks: Tensor | None = None, softcap: float = 0.0
) -> Results:
    """One of them has more than one partition of keys."""
    head_dim = kernel.number or WIDTH
    queries, cache, metadata = _attention([(70, 1), (3, 1)], head_dim, dtype)
    out = unwritten(*queries.shape)
    kernel.run(decode_arguments(queries, cache, metadata, out, sinks, softcap), 1)
    return out, reference.paged_attention(queries, cache, metadata, sinks=sinks, softcap=softcap)


def _all_decodes(kernel: Kernel) -> Results:
    both = [
        _decodes(kernel, torch.float32),
        _decodes(kernel, torch.bfloat16, random_values(HEADS), SOFTCAP),
    ]
    actual, expected = (torch.stack(results) for results in zip(*both, strict=True))
    return actual, expected


def _rounded_decodes(kernel: Kernel) -> Results:
    return _decodes(kernel, torch.bfloat16, random_values(HEADS), SOFTCAP)


def _chunk(kernel: Kernel) -> Results:
    queries, cache, metadata = _attention([(70, 19)], kernel.number, torch.bfloat16)
    out = unwritten(*queries.shape)
    [own], sinks = metadata.chunk_numbers, random_values(HEADS)
    kernel.run(chunk_arguments(queries, cache, own, out, sinks, SOFTCAP), 1)
    return out, reference.paged_attention(queries, cache, metadata, sinks=sinks, softcap=SOFTCAP)


DECODES = KnownCase("decode_attention", _all_decodes, tolerance=1e-5)
BF16_DECODES = KnownCase("bf16_decode_attention", _rounded_decodes, tolerance=1e-2)
"""Cases of kernels that round queries and weights too."""
CHUNK = KnownCase("prefill_attention", _chunk, tolerance=1e-5)
BF16_CHUNK = KnownCase("bf16_prefill_attention", _chunk, tolerance=1e-2)
AMX_CHUNK = KnownCase("amx_attention", _chunk, tolerance=1e-2)
