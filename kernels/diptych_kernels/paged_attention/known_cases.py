"""The test cases for the kernels for attention."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diptych_kernels.native.kernel import Kernel
from diptych_kernels.paged_attention import reference
from diptych_kernels.paged_attention.calls import WIDTH, chunk_arguments, decode_arguments
from diptych_kernels.paged_attention.metadata import AttentionMetadata
from diptych_kernels.trust import KnownCase, Results, random_values, unwritten

HEADS, KV_HEADS, BLOCK_SIZE = 4, 2, 16


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


def _decodes(kernel: Kernel, dtype: torch.dtype) -> Results:
    """One of them has more than one partition of keys."""
    head_dim = kernel.number or WIDTH
    queries, cache, metadata = _attention([(70, 1), (3, 1)], head_dim, dtype)
    out = unwritten(*queries.shape)
    kernel.run(decode_arguments(queries, cache, metadata, out), 1)
    return out, reference.paged_attention(queries, cache, metadata)


def _all_decodes(kernel: Kernel) -> Results:
    both = [_decodes(kernel, dtype) for dtype in (torch.float32, torch.bfloat16)]
    actual, expected = (torch.stack(results) for results in zip(*both, strict=True))
    return actual, expected


def _rounded_decodes(kernel: Kernel) -> Results:
    return _decodes(kernel, torch.bfloat16)


def _chunk(kernel: Kernel) -> Results:
    queries, cache, metadata = _attention([(70, 19)], kernel.number, torch.bfloat16)
    out = unwritten(*queries.shape)
    [own] = metadata.chunk_numbers
    kernel.run(chunk_arguments(queries, cache, own, out), 1)
    return out, reference.paged_attention(queries, cache, metadata)


DECODES = KnownCase("decode_attention", _all_decodes, tolerance=1e-5)
BF16_DECODES = KnownCase("bf16_decode_attention", _rounded_decodes, tolerance=1e-2)
"""Cases of kernels that round queries and weights too."""
CHUNK = KnownCase("prefill_attention", _chunk, tolerance=1e-5)
AMX_CHUNK = KnownCase("amx_attention", _chunk, tolerance=1e-2)
