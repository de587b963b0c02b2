"""What is measured: each kernel at a few sizes, with torch's way beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.kernels import costs
from benchmarks.kernels.costs import Cost, Model
from numpy.typing import NDArray
from torch import Tensor

from diptych_kernels.block_copy import gather_blocks, scatter_blocks
from diptych_kernels.native.tile_layout import SPANS
from diptych_kernels.packed_product import packed_product, unpack_rows
from diptych_kernels.packed_product.gpu_tiles import to_gpu_tiles
from diptych_kernels.paged_attention import AttentionMetadata, paged_attention
from diptych_kernels.rms_norm import rms_norm
from diptych_kernels.rope_kv_write import reference as rope_kv_write_reference
from diptych_kernels.rope_kv_write import rope_kv_write
from diptych_kernels.sampling import Filters, sample
from diptych_kernels.sampling import reference as sampling_reference
from diptych_kernels.silu_mul import silu_mul

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: tuple[int, ...] = (16, 256, 8192)
    decodes: tuple[tuple[int, int], ...] = ((16, 4096), (64, 4096), (256, 4096), (16, 32768))
    """Sequences, and tokens in the context of each."""
    skews: tuple[tuple[int, int, int], ...] = ((16, 32768, 1024), (64, 8192, 256))
    """Sequences, tokens in the context of the first, and in those of the others."""
    prefills: tuple[tuple[int, int], ...] = ((2048, 0), (8192, 0), (2048, 6144))
    """New tokens, and those before them."""
    blocks: int = 256
    sampled: tuple[int, ...] = (1, 64, 256)
    decode_steps: tuple[tuple[int, int], ...] = ((1, 4096), (16, 4096), (64, 4096), (256, 1024))
    prefill_steps: tuple[int, ...] = (2048, 8192)
    mixed_steps: tuple[tuple[int, int, int], ...] = ()
    """Decodes, tokens in the context of each, and tokens of a prompt beside them."""


@dataclass(frozen=True, slots=True)
class Case:
    """`ours` and `torchs` compute the same on data of their own, which they may change."""

    kernel: str
    size: str
    cost: Cost
    ours: Callable[[], Tensor]
    torchs: Callable[[], Tensor] | None
    """torch's fused operation where it has one, else the reference; None for whole steps."""


@dataclass(frozen=True, slots=True)
class Workload:
    model: Model
    device: torch.device
    dtype: torch.dtype

    def cases(self, sizes: Sizes) -> Iterator[Case]:
        """One after the other, so that only few have their tensors on the device."""
        for rows in sizes.rows:
            yield from self.rows(rows)
            yield from self.heads(rows)
            yield from self.products(rows)
        for sequences, context in sizes.decodes:
            yield self.decode(sequences, context, context)
        for sequences, longest, others in sizes.skews:
            yield self.decode(sequences, longest, others)
        for new, prefix in sizes.prefills:
            yield self.prefill(new, prefix)
        yield from self.blocks(sizes.blocks)
        for rows in sizes.sampled:
            yield self.sampling(rows)

    def rows(self, rows: int) -> Iterator[Case]:
        """What works on hidden states."""
        size, model = f"{rows} rows", self.model
        x, weight = self.random(rows, model.hidden), self.random(model.hidden)
        yield Case(
            "rms_norm", size, costs.rms_norm(model, rows),
            lambda: rms_norm(x, weight, EPS), lambda: F.rms_norm(x, weight.shape, weight, EPS),
        )  # fmt: skip
        gate_up = self.random(rows, 2 * model.intermediate)
        gate, up = gate_up.chunk(2, -1)
        yield Case(
            "silu_mul", size, costs.silu_mul(model, rows),
            lambda: silu_mul(gate_up), lambda: F.silu(gate).mul_(up),
        )  # fmt: skip

    def heads(self, rows: int) -> Iterator[Case]:
        """What works on a step's new queries, keys and values."""
        size, model = f"{rows} tokens", self.model
        turned = model.heads + model.kv_heads
        heads = twice(self.random(rows, turned + model.kv_heads, model.head_dim))
        layers = twice(self.cache(rows // model.block_size + 1))
        angles = torch.randn(rows, 1, model.head_dim // 2, device=self.device)
        rotations = torch.stack((angles.cos(), angles.sin()), -1)
        slots = torch.randperm(rows, device=self.device)
        where = slots // model.block_size, slots % model.block_size

        def both(way: Callable[..., None], side: int) -> Tensor:
            way(heads[side], rotations, layers[side], *where)
            return layers[side]

        yield Case(
            "rope_kv_write", size, costs.rope_kv_write(model, rows),
            lambda: both(rope_kv_write, 0),
            lambda: both(rope_kv_write_reference.rope_kv_write, 1),
        )  # fmt: skip

    def products(self, rows: int) -> Iterator[Case]:
        """The products of a layer as the models have them, [in, out], beside the other layout."""
        for name, inputs, outputs in costs.products(self.model):
            yield self.product(name, rows, inputs, outputs)

    def product(self, name: str, rows: int, inputs: int, outputs: int) -> Case:
        x, weight = self.random(rows, inputs), self.random(inputs, outputs).mul_(inputs**-0.5)
        other = weight.t().contiguous()
        return Case(
            f"product, {name}", f"{rows} rows", costs.product(self.model, rows, inputs, outputs),
            lambda: x.mm(weight), lambda: F.linear(x, other),
        )  # fmt: skip

    def packed_product(self, rows: int, inputs: int, outputs: int, bits: int, copies: int) -> Case:
        """Products with some packed matrices, one after the other, so that no cache holds them.
        The cost is that of one."""
        span = SPANS[bits]
        levels = torch.randint(1 << bits, (outputs, inputs), device=self.device).to(torch.uint8)
        scale = torch.rand(outputs, inputs // span, device=self.device).div_(1 << bits)
        tiles = to_gpu_tiles(levels, scale.div_(inputs**0.5), scale * -(1 << bits - 1), bits)
        assert tiles is not None
        x, weight = self.random(rows, inputs), self.random(outputs, inputs)
        unpack_rows(tiles, weight)
        packed = [tiles.clone() for _ in range(copies)]
        plain = [weight.t().contiguous() for _ in range(copies)]
        out = self.random(rows, outputs)

        def ours() -> Tensor:
            for each in packed:
                packed_product(x, each, out, num_decodes=rows)
            return out

        return Case(
            f"packed product, {bits} bits", f"{inputs} x {outputs}, {rows} rows",
            costs.packed_product(self.model, rows, inputs, outputs, tiles.nbytes),
            ours, lambda: [x.mm(each) for each in plain][-1],
        )  # fmt: skip

    def decode(self, sequences: int, longest: int, others: int) -> Case:
        """One new token for each of some sequences, beside SDPA on keys without pages."""
        queries = self.random(sequences, self.model.heads, self.model.head_dim)
        contexts = np.full(sequences, others)
        contexts[0] = longest
        layer, tables = self.scattered(contexts)
        metadata = AttentionMetadata(
            query_starts=np.arange(sequences + 1),
            context_lens=contexts,
            block_tables=tables,
            num_decodes=sequences,
            block_size=self.model.block_size,
            device=self.device,
        )
        keys, values = self.dense(layer, tables, longest)
        mask = None
        if others < longest:
            lengths = torch.from_numpy(contexts).to(self.device)
            places = torch.arange(longest, device=self.device)
            mask = (places < lengths[:, None])[:, None, None]

        def torchs() -> Tensor:
            attended = F.scaled_dot_product_attention(
                queries.unsqueeze(2), keys, values, attn_mask=mask, enable_gqa=True
            )
            return attended.squeeze(2)

        size = f"{sequences} x {others}" + (f", but one of {longest}" if others < longest else "")
        return Case(
            "paged_attention, decode", size,
            costs.decode_attention(self.model, contexts.tolist()),
            lambda: paged_attention(queries, layer, metadata), torchs,
        )  # fmt: skip

    def prefill(self, new: int, prefix: int) -> Case:
        """New tokens of one sequence, beside SDPA on keys without pages."""
        queries = self.random(new, self.model.heads, self.model.head_dim)
        context = new + prefix
        layer, tables = self.scattered(np.array([context]))
        metadata = AttentionMetadata(
            query_starts=np.array([0, new]),
            context_lens=np.array([context]),
            block_tables=tables,
            num_decodes=0,
            block_size=self.model.block_size,
            device=self.device,
        )
        keys, values = self.dense(layer, tables, context)
        mask = None
        if prefix:
            mask = torch.ones(new, context, dtype=torch.bool, device=self.device).tril(prefix)

        def torchs() -> Tensor:
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1).unsqueeze(0), keys, values,
                attn_mask=mask, is_causal=mask is None, enable_gqa=True,
            )  # fmt: skip
            return attended.squeeze(0).transpose(0, 1)

        return Case(
            "paged_attention, prefill", f"{new} after {prefix}",
            costs.prefill_attention(self.model, new, prefix),
            lambda: paged_attention(queries, layer, metadata), torchs,
        )  # fmt: skip

    def blocks(self, count: int) -> Iterator[Case]:
        """Blocks of all layers, half of those in the cache."""
        model = self.model
        shape = (model.layers, 2, model.block_size, model.kv_heads, model.head_dim)
        cache, staging = self.random(2 * count, *shape), self.random(count, *shape)
        ids = torch.randperm(2 * count, device=self.device)[:count]
        cost = costs.block_copy(model, count)

        def gather() -> Tensor:
            gather_blocks(cache, ids, staging)
            return staging

        def scatter() -> Tensor:
            scatter_blocks(staging, cache, ids)
            return cache

        yield Case(
            "gather_blocks", f"{count} blocks", cost, gather, lambda: cache.index_select(0, ids)
        )
        other = cache.clone()
        yield Case(
            "scatter_blocks", f"{count} blocks", cost, scatter,
            lambda: other.index_copy_(0, ids, staging),
        )  # fmt: skip

    def sampling(self, rows: int) -> Case:
        logits = 3 * torch.randn(rows, self.model.vocabulary, device=self.device)
        temperature = torch.full((rows,), 0.8, device=self.device)
        where = torch.arange(rows, dtype=torch.float64, device=self.device) / 1024
        filters = Filters(
            torch.full((rows,), 50, device=self.device),
            torch.full((rows,), 0.9, dtype=torch.float64, device=self.device),
            torch.zeros(rows, device=self.device),
        )
        return Case(
            "sampling, top-k 50 and top-p 0.9", f"{rows} rows", costs.sampling(self.model, rows),
            lambda: sample(logits, temperature, where, filters),
            lambda: sampling_reference.sample(logits, temperature, where, filters),
        )  # fmt: skip

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def cache(self, blocks: int) -> Tensor:
        """One layer of two: [blocks, 2, block_size, kv_heads, head_dim], strided."""
        model = self.model
        return self.random(blocks, 2, 2, model.block_size, model.kv_heads, model.head_dim)[:, 1]

    def scattered(self, contexts: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.int64]]:
        """A cache, and block tables that go through it in no order. Past a sequence's end they name
        the first block."""
        widths = -(-contexts // self.model.block_size)
        order = np.random.default_rng(0).permutation(widths.sum())
        tables = np.zeros((len(contexts), widths.max()), np.int64)
        tables[np.arange(widths.max()) < widths[:, None]] = order
        return self.cache(len(order)), tables

    def dense(
        self, layer: Tensor, tables: NDArray[np.int64], context: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, [sequences, kv_heads, context, head_dim] each, as SDPA wants them."""
        ids = torch.from_numpy(tables).to(self.device)
        halves = (layer[:, half][ids].flatten(1, 2)[:, :context] for half in (0, 1))
        keys, values = (half.transpose(1, 2).contiguous() for half in halves)
        return keys, values


def twice(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """For two who each change their own."""
    return tensor, tensor.clone()
