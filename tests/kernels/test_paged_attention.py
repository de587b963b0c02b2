"""Paged attention against dense attention of each sequence alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych_kernels.paged_attention import AttentionMetadata, paged_attention
from diptych_kernels.paged_attention.metadata import MAX_GROUP_TOKENS

NUM_LAYERS, LAYER = 3, 1


class Batch:
    """Sequences with random keys, values and queries, scattered over the blocks of a cache."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        block_size: int = 4,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 8,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        garbage: float = 1e4,
    ) -> None:
        """`sequences`: (context, new tokens) each; `garbage` fills all slots of no sequence."""
        torch.manual_seed(0)
        self.sequences, self.window = sequences, window
        blocks_of = [-(-context // block_size) for context, _ in sequences]
        order = np.random.default_rng(0).permutation(sum(blocks_of) + 5)
        shape = (len(order), NUM_LAYERS, 2, block_size, kv_heads, head_dim)
        cache = torch.full(shape, garbage, dtype=dtype)
        self.kv_layer = cache[:, LAYER]
        tables = np.zeros((len(sequences), max(blocks_of)), np.int64)
        self.keys_values: list[Tensor] = []
        used = 0
        for row, (context, _) in enumerate(sequences):
            ids = order[used : used + blocks_of[row]]
            used += blocks_of[row]
            tables[row, : len(ids)] = ids
            dense = torch.randn(context, 2, kv_heads, head_dim).to(dtype)
            self.keys_values.append(dense)
            for position in range(context):
                block = int(ids[position // block_size])
                self.kv_layer[block, :, position % block_size] = dense[position]
        counts = np.array([new for _, new in sequences])
        self.queries = torch.randn(int(counts.sum()), heads, head_dim).to(dtype)
        self.metadata = AttentionMetadata(
            query_starts=np.concatenate(([0], counts.cumsum())),
            context_lens=np.array([context for context, _ in sequences]),
            block_tables=tables,
            num_decodes=int((counts == 1).sum()),
            block_size=block_size,
            window=window,
        )

    def expected(self) -> Tensor:
        """Query by query and head by head."""
        outputs = []
        begin = 0
        for (context, new), dense in zip(self.sequences, self.keys_values, strict=True):
            for offset in range(new):
                position = context - new + offset
                first = 0 if self.window is None else max(0, position - self.window + 1)
                query = self.queries[begin + offset].double()
                keys, values = dense[first : position + 1].double().unbind(1)
                sharing = query.shape[0] // keys.shape[1]
                heads = []
                for head in range(query.shape[0]):
                    scores = keys[:, head // sharing] @ query[head] / math.sqrt(query.shape[1])
                    heads.append(scores.softmax(0) @ values[:, head // sharing])
                outputs.append(torch.stack(heads))
            begin += new
        return torch.stack(outputs)

    def check(self, atol: float = 1e-5) -> None:
        actual = paged_attention(self.queries, self.kv_layer, self.metadata)
        torch.testing.assert_close(actual.double(), self.expected(), atol=atol, rtol=1e-5)


@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param([(1, 1)], id="first token"),
        pytest.param([(7, 1)], id="one decode"),
        pytest.param([(8, 1), (8, 1)], id="equal decodes at a block's end"),
        pytest.param([(5, 1), (6, 1), (9, 1)], id="similar decodes"),
        pytest.param([(3, 1), (70, 1), (1, 1), (33, 1), (65, 1)], id="very different decodes"),
        pytest.param([(9, 9)], id="whole prefill"),
        pytest.param([(13, 5)], id="chunk after a prefix"),
        pytest.param([(13, 5), (6, 6), (7, 2)], id="several chunks"),
        pytest.param([(40, 1), (2, 1), (11, 3), (6, 6)], id="decodes and chunks"),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 4, 10])
def test_equals_dense_attention(sequences: list[tuple[int, int]], window: int | None) -> None:
    Batch(sequences, window=window).check()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 8, 16), (9, 3, 64, 16), (5, 1, 6, 1), (2, 1, 16, 32)],
)
def test_any_head_sharing_and_block_size(
    heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    Batch(
        [(21, 1), (3, 1), (17, 6)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    ).check()


def test_bfloat16() -> None:
    Batch([(21, 1), (3, 1), (17, 6)], dtype=torch.bfloat16).check(atol=3e-2)


def test_decodes_too_many_for_one_gather_are_split() -> None:
    batch = Batch([(MAX_GROUP_TOKENS // 8, 1)] * 9, block_size=64, heads=2, kv_heads=1)
    assert [group.size for group in batch.metadata.decode_groups] == [8, 1]
    batch.check()


def test_padding_is_bounded() -> None:
    """One long decode does not make its short neighbours read as many keys."""
    batch = Batch([(1024, 1)] + [(8, 1)] * 31)
    read = sum(group.size * group.longest for group in batch.metadata.decode_groups)
    assert read <= 2 * sum(context for context, _ in batch.sequences)
    assert len(batch.metadata.decode_groups) == 2


def test_strided_queries() -> None:
    """The model passes the query part of a fused projection."""
    batch = Batch([(9, 1), (12, 4)])
    fused = torch.cat((batch.queries, torch.full_like(batch.queries, torch.nan)), dim=1)
    batch.queries = fused[:, : batch.queries.shape[1]]
    batch.check()
