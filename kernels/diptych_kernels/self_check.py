"""For each kernel of a CPU a small case, what it is held against, and how far it may be from that.

Numbers are the same in every process. Sizes are no multiples of anything where a kernel allows
that, so that its remainders are computed too; all takes some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych_kernels.call_table import rows_of
from diptych_kernels.native.arguments import Arguments, Table
from diptych_kernels.native.kernel import Kernel
from diptych_kernels.native.tile_layout import GROUP
from diptych_kernels.packed_product import cpu as packed_product
from diptych_kernels.packed_product import reference as packed_reference
from diptych_kernels.packed_product.tiles import to_tiles
from diptych_kernels.paged_attention import cpu as attention
from diptych_kernels.paged_attention import reference as attention_reference
from diptych_kernels.paged_attention.metadata import AttentionMetadata
from diptych_kernels.rms_norm import cpu as rms_norm
from diptych_kernels.rms_norm import reference as norm_reference
from diptych_kernels.rope_kv_write import cpu as rope_kv_write
from diptych_kernels.rope_kv_write import reference as rope_reference
from diptych_kernels.silu_mul import cpu as silu_mul
from diptych_kernels.silu_mul import reference as gate_reference

EPS: Final = 1e-5
HEADS, KV_HEADS, BLOCK_SIZE = 4, 2, 16
Results = tuple[Tensor, Tensor]
"""The kernel's, and the reference's."""


@dataclass(frozen=True)
class Case:
    """How a kernel is tried."""

    results: Callable[[Kernel], Results]
    tolerance: float
    """Norm of the difference over the reference's norm."""

    @torch.inference_mode()
    def distance(self, kernel: Kernel) -> float:
        """By one thread: on a busy machine several wait for each other longer than all takes."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            actual, expected = self.results(kernel)
            return float((actual - expected).norm() / expected.norm())
        finally:
            torch.set_num_threads(threads)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _unwritten(*shape: int) -> Tensor:
    """Where results go: what a kernel does not write is seen."""
    return torch.full(shape, torch.nan)


def _run(kernel: Kernel, arguments: Arguments) -> None:
    kernel.run(arguments, 1)


def _norm(kernel: Kernel) -> Results:
    x, weight, out = _random(3, 75), _random(75), _unwritten(3, 75)
    _, arguments = rms_norm.call(x, weight, EPS, out)
    _run(kernel, arguments)
    return out, norm_reference.rms_norm(x, weight, EPS)


def _gate(kernel: Kernel) -> Results:
    x, out = _random(3, 150), _unwritten(3, 75)
    _, arguments = silu_mul.call(x, out)
    _run(kernel, arguments)
    return out, gate_reference.silu_mul(x)


def _table(kernel: Kernel) -> Results:
    """A table of two calls; a fault of the called kernel is in both results."""
    x, actual, expected = _random(2, 3, 150), _unwritten(2, 3, 75), _unwritten(2, 3, 75)
    table = rows_of([silu_mul.call(x[i], actual[i]) for i in range(2)])
    _run(kernel, Table(table.ctypes.data, len(table)))
    for i in range(2):
        _run(*silu_mul.call(x[i], expected[i]))
    return actual, expected


def _rotation(kernel: Kernel) -> Results:
    """Into a cache of either type, rounded ones second."""
    tokens, head_dim = 5, 24
    bias = _random((HEADS + 2 * KV_HEADS) * head_dim)
    norms = _random(2, head_dim)
    angles = _random(tokens, 1, head_dim // 2)
    rotations = torch.stack([angles.cos(), angles.sin()], -1)
    blocks, offsets = torch.tensor([2, 0, 0, 1, 2]), torch.tensor([3, 0, 1, 2, 0])
    made: list[list[Tensor]] = []
    for uses_kernel in (True, False):
        mine: list[Tensor] = []
        for dtype in (torch.float32, torch.bfloat16):
            heads = _random(tokens, HEADS + 2 * KV_HEADS, head_dim)
            cache = torch.zeros(3, 2, 4, KV_HEADS, head_dim, dtype=dtype)
            where = heads, rotations, cache, blocks, offsets
            if uses_kernel:
                _, arguments = rope_kv_write.call(*where, bias, norms[0], norms[1], EPS)
                _run(kernel, arguments)
            else:
                rope_reference.rope_kv_write(*where, 1.0, bias, norms[0], norms[1], EPS)
            mine += [heads[:, :HEADS].flatten(), cache.float().flatten()]
        made.append(mine)
    return torch.cat(made[0]), torch.cat(made[1])


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
    cache = _random(len(ids), 2, BLOCK_SIZE, KV_HEADS, head_dim).to(dtype)
    return _random(int(counts.sum()), HEADS, head_dim), cache, metadata


def _decodes(kernel: Kernel, dtype: torch.dtype) -> Results:
    """One of them has more than one partition of keys."""
    head_dim = kernel.number or attention.WIDTH
    queries, cache, metadata = _attention([(70, 1), (3, 1)], head_dim, dtype)
    out = _unwritten(*queries.shape)
    _run(kernel, attention.decode_arguments(queries, cache, metadata, out))
    return out, attention_reference.paged_attention(queries, cache, metadata)


def _all_decodes(kernel: Kernel) -> Results:
    both = [_decodes(kernel, dtype) for dtype in (torch.float32, torch.bfloat16)]
    actual, expected = (torch.stack(results) for results in zip(*both, strict=True))
    return actual, expected


def _rounded_decodes(kernel: Kernel) -> Results:
    return _decodes(kernel, torch.bfloat16)


def _chunk(kernel: Kernel) -> Results:
    queries, cache, metadata = _attention([(70, 19)], kernel.number, torch.bfloat16)
    out = _unwritten(*queries.shape)
    [own] = metadata.chunk_numbers
    _run(kernel, attention.chunk_arguments(queries, cache, own, out))
    return out, attention_reference.paged_attention(queries, cache, metadata)


def _factors(bits: int) -> tuple[Tensor, Tensor]:
    """Rows, for blocks of every size, and the tiles that they are multiplied with."""
    groups, columns = 3, 48
    generator = torch.Generator().manual_seed(bits)
    levels = torch.randint(0, 1 << bits, (columns, groups * GROUP), generator=generator)
    scale, offset = _random(2, columns, groups)
    tiles = to_tiles(levels.to(torch.uint8), scale, offset, bits)
    assert tiles is not None
    return _random(19, groups * GROUP), tiles


def _product(kernel: Kernel) -> Results:
    x, tiles = _factors(kernel.number)
    workspace = torch.empty(packed_product.workspace_bytes(*x.shape), dtype=torch.int8)
    actual, expected = _unwritten(2, len(x), 48)
    _, arguments = packed_product.decode_call(x, tiles, actual, workspace, add=False)
    _run(kernel, arguments)
    packed_reference.packed_product(x, tiles, expected, num_decodes=len(x))
    return actual, expected


def _product_in_tiles(kernel: Kernel) -> Results:
    x, tiles = _factors(kernel.number)
    workspace = torch.empty(packed_product.workspace_bytes(*x.shape), dtype=torch.int8)
    actual, expected = _unwritten(2, len(x), 48)
    _, arguments = packed_product.chunk_call(x, 0, tiles, actual, workspace, add=False)
    _run(kernel, arguments)
    packed_reference.packed_product(x, tiles, expected, num_decodes=0)
    return actual, expected


CASES: Final = {
    "rms_norm": Case(_norm, 1e-5),
    "silu_mul": Case(_gate, 1e-5),
    "run_calls": Case(_table, 0.0),
    "rope_kv_write": Case(_rotation, 1e-3),  # a rounded number may be the next one
    "decode_attention": Case(_all_decodes, 1e-5),
    "bf16_decode_attention": Case(_rounded_decodes, 1e-2),  # queries and weights are rounded too
    "prefill_attention": Case(_chunk, 1e-5),
    "amx_attention": Case(_chunk, 1e-2),
    "packed_product": Case(_product, 1e-4),
    "amx_product": Case(_product_in_tiles, 1e-4),
}
"""By the kernels' names."""
