"""Batches of sequences with random keys, values and queries, and what attention makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych_kernels.paged_attention import AttentionMetadata

NUM_LAYERS, LAYER = 3, 1


class Batch:
    """Sequences scattered over the blocks of a cache."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        block_size: int = 4,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 8,
        window: int | None = None,
        has_sinks: bool = False,
        softcap: float = 0.0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        kv_scale: float = 1.0,
        garbage: float = 1e4,
        device: torch.device | None = None,
    ) -> None:
        """`sequences`: (context, new tokens) each; `garbage` fills all slots of no sequence."""
        torch.manual_seed(0)
        device = device or torch.device("cpu")
        kv_dtype = kv_dtype or dtype
        self.sequences, self.window, self.kv_scale = sequences, window, kv_scale
        self.softcap = softcap
        blocks_of = [-(-context // block_size) for context, _ in sequences]
        order = np.random.default_rng(0).permutation(sum(blocks_of) + 5)
        shape = (len(order), NUM_LAYERS, 2, block_size, kv_heads, head_dim)
        cache = torch.full(shape, garbage).to(kv_dtype)
        tables = np.zeros((len(sequences), max(blocks_of)), np.int64)
        self.keys_values: list[Tensor] = []
        """[context, 2, kv_heads, head_dim] float64 of each sequence, as the cache has them."""
        used = 0
        for row, (context, _) in enumerate(sequences):
            ids = order[used : used + blocks_of[row]]
            used += blocks_of[row]
            tables[row, : len(ids)] = ids
            dense = (torch.randn(context, 2, kv_heads, head_dim) / kv_scale).to(kv_dtype)
            self.keys_values.append(dense.double() * kv_scale)
            for position in range(context):
                block = int(ids[position // block_size])
                cache[block, LAYER, :, position % block_size] = dense[position]
        self.kv_layer = cache.to(device)[:, LAYER]
        counts = np.array([new for _, new in sequences])
        self.queries = torch.randn(int(counts.sum()), heads, head_dim).to(device, dtype)
        self.sinks = torch.randn(heads).to(device, dtype) + 1.0 if has_sinks else None
        self.metadata = AttentionMetadata(
            query_starts=np.concatenate(([0], counts.cumsum())),
            context_lens=np.array([context for context, _ in sequences]),
            block_tables=tables,
            num_decodes=int((counts == 1).sum()),
            block_size=block_size,
            window=window,
            device=device,
        )

    def expected(self) -> Tensor:
        """Query by query, on the CPU in float64."""
        queries = self.queries.cpu().double()
        outputs = []
        begin = 0
        for (context, new), dense in zip(self.sequences, self.keys_values, strict=True):
            for offset in range(new):
                position = context - new + offset
                first = 0 if self.window is None else max(0, position - self.window + 1)
                keys, values = dense[first : position + 1].unbind(1)
                query = queries[begin + offset].view(keys.shape[1], -1, keys.shape[2])
                scores = torch.einsum("ghd,tgd->ght", query, keys) / math.sqrt(query.shape[-1])
                if self.softcap:
                    scores = self.softcap * (scores / self.softcap).tanh()
                if self.sinks is not None:
                    sinks = self.sinks.cpu().double().view(keys.shape[1], -1, 1)
                    scores = torch.cat([scores, sinks], -1)
                shares = scores.softmax(-1)[..., : len(keys)]
                attended = torch.einsum("ght,tgd->ghd", shares, values)
                outputs.append(attended.flatten(0, 1))
            begin += new
        return torch.stack(outputs)

    def check(self, attend: Callable[..., Tensor], atol: float = 1e-5, rtol: float = 1e-5) -> None:
        """`attend` has the arguments of `paged_attention`."""
        options: dict[str, Any] = {}
        if self.kv_scale != 1.0:
            options["kv_scale"] = self.kv_scale
        if self.sinks is not None:
            options["sinks"] = self.sinks
        if self.softcap:
            options["softcap"] = self.softcap
        actual = attend(self.queries, self.kv_layer, self.metadata, **options)
        torch.testing.assert_close(actual.cpu().double(), self.expected(), atol=atol, rtol=rtol)
