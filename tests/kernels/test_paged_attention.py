"""Paged attention against dense attention of each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import each
from model_kit.attention_batch import Batch

from diptych_kernels.paged_attention import reference
from diptych_kernels.paged_attention.metadata import MAX_GROUP_TOKENS


@each(
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
@each("window", [None, 1, 4, 10])
@each(
    "scoring",
    [
        pytest.param({}, id="plain"),
        pytest.param({"has_sinks": True}, id="sinks"),
        pytest.param({"softcap": 1.5}, id="capped"),
    ],
)
def test_equals_dense_attention(
    sequences: list[tuple[int, int]], window: int | None, scoring: dict[str, Any]
) -> None:
    Batch(sequences, window=window, **scoring).check(reference.paged_attention)


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
    ).check(reference.paged_attention)


def test_bfloat16() -> None:
    Batch([(21, 1), (3, 1), (17, 6)], dtype=torch.bfloat16).check(
        reference.paged_attention, atol=3e-2
    )


def test_decodes_too_many_for_one_gather_are_split() -> None:
    batch = Batch([(MAX_GROUP_TOKENS // 8, 1)] * 9, block_size=64, heads=2, kv_heads=1)
    assert [group.size for group in batch.metadata.decode_groups] == [8, 1]
    batch.check(reference.paged_attention)


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
    batch.check(reference.paged_attention)
