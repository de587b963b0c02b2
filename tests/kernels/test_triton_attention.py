"""The paged attention kernel against dense attention of each sequence alone, in float64.

Scores and sums are float32. With 16-bit inputs the softmax's weights are rounded before they meet
the values, and the result is rounded once more: two roundings of relative size eps / 2 of numbers
that are about 1, and sums of independent roundings grow less than their terms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit.attention_batch import Batch

from diptych_kernels.paged_attention.gpu_schedule import (
    HEADER,
    MIN_SPLIT,
    PROGRAMS_PER_PROCESSOR,
    Geometry,
    cut_tiles,
    keys_per_split,
    most_splits,
    schedule,
)
from diptych_kernels.paged_attention.triton import paged_attention
from diptych_kernels.rope_kv_write.reference import FLOAT8

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Twice the eps of the 16-bit types."""


def check(batch: Batch) -> None:
    tolerance = TOLERANCE[batch.queries.dtype]
    batch.check(paged_attention, atol=tolerance, rtol=tolerance)


@pytest.mark.one_in(4, "sequences", "window", "scoring")
@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param([(1, 1)], id="first token"),
        pytest.param([(5, 1), (16, 1), (17, 1), (64, 1)], id="decodes at and past a block's end"),
        pytest.param([(70, 70)], id="whole prefill"),
        pytest.param([(90, 45), (2, 2), (33, 3)], id="chunks after prefixes"),
        pytest.param([(40, 1), (2, 1), (11, 3), (50, 50)], id="decodes and chunks"),
        pytest.param([(3 * MIN_SPLIT - 20, 1), (3, 1), (MIN_SPLIT, 1)], id="split decodes"),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 10, MIN_SPLIT + 5])
@pytest.mark.parametrize(
    "scoring",
    [
        pytest.param({}, id="plain"),
        pytest.param({"has_sinks": True}, id="sinks"),
        pytest.param({"softcap": 1.5}, id="capped"),
    ],
)
def test_equals_dense_attention(
    sequences: list[tuple[int, int]],
    window: int | None,
    scoring: dict[str, Any],
    device: torch.device,
) -> None:
    check(Batch(sequences, block_size=16, window=window, **scoring, device=device))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 16, 8), (9, 3, 64, 16), (5, 1, 6, 1), (8, 1, 128, 32), (40, 2, 24, 16), (2, 2, 80, 12)],
)
def test_any_head_sharing_dimension_and_block_size(
    heads: int, kv_heads: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    batch = Batch(
        [(21, 1), (3, 1), (37, 26)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        device=device,
    )
    check(batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kv_dtype", [None, FLOAT8], ids=["plain", "float8"])
def test_16_bit_queries_and_8_bit_caches(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device
) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter of Triton 3.7 multiplies matrices of bf16 as if of integers")
    batch = Batch(
        [(21, 1), (2 * MIN_SPLIT + 9, 1), (37, 26)],
        heads=4,
        kv_heads=1,
        head_dim=64,
        block_size=16,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scale=1.0 if kv_dtype is None else 0.25,
        # What stands in slots of nobody must not reach the sums, not even as NaN.
        garbage=torch.nan,
        device=device,
    )
    check(batch)


def test_queries_that_are_part_of_a_fused_projection(device: torch.device) -> None:
    batch = Batch([(9, 1), (12, 4)], device=device)
    fused = torch.cat((batch.queries, torch.full_like(batch.queries, torch.nan)), dim=1)
    batch.queries = fused[:, : batch.queries.shape[1]]
    check(batch)


counts = st.lists(st.tuples(st.integers(0, 300), st.integers(2, 200)), max_size=6)


@given(decodes=st.lists(st.integers(1, 5000), max_size=8), chunks=counts, tile=st.integers(1, 128))
def test_tiles_hold_every_new_token_once(
    decodes: list[int], chunks: list[tuple[int, int]], tile: int
) -> None:
    new = [1] * len(decodes) + [count for _, count in chunks]
    starts = np.concatenate(([0], np.cumsum(new))).astype(np.int64)
    tiles = cut_tiles(starts, len(decodes), tile)
    assert tiles[: len(decodes)].tolist() == [[i, 0] for i in range(len(decodes))]
    tokens = [
        starts[sequence] + token
        for sequence, first in tiles.tolist()
        for token in range(first, min(first + tile, new[sequence]))
    ]
    assert sorted(tokens) == list(range(sum(new)))


@given(
    visible=st.lists(st.integers(1, 200_000), min_size=1, max_size=64),
    kv_heads=st.sampled_from([1, 3, 8, 32]),
    processors=st.integers(1, 200),
)
def test_splits_fill_the_device_but_are_no_smaller_than_needed(
    visible: list[int], kv_heads: int, processors: int
) -> None:
    split = keys_per_split(np.array(visible), Geometry(kv_heads, kv_heads, processors))
    assert split >= MIN_SPLIT
    assert split & (split - 1) == 0
    wanted = processors * PROGRAMS_PER_PROCESSOR
    programs = kv_heads * sum(-(-keys // split) for keys in visible)
    assert split == MIN_SPLIT or programs >= wanted
    assert split == MIN_SPLIT or sum(visible) * kv_heads / (2 * split) < wanted


def test_a_window_bounds_what_a_decode_is_split_into() -> None:
    starts, contexts = np.arange(3), np.array([100_000, 10])
    tables = np.zeros((2, 4), np.int64)
    whole = schedule(starts, contexts, tables, 2, None, Geometry(8, 8, 132))
    windowed = schedule(starts, contexts, tables, 2, MIN_SPLIT, Geometry(8, 8, 132))
    assert whole.num_splits == -(-100_000 // whole.numbers[0]) > 1
    assert windowed.num_splits == 1


@settings(max_examples=30)
@given(decodes=st.lists(st.integers(1, 90), max_size=4), chunks=counts.map(lambda c: c[:2]))
def test_the_packed_numbers_are_where_the_schedule_says(
    decodes: list[int], chunks: list[tuple[int, int]]
) -> None:
    new = [1] * len(decodes) + [count for _, count in chunks]
    contexts = np.array(decodes + [prefix + count for prefix, count in chunks], np.int64)
    starts = np.concatenate(([0], np.cumsum(new))).astype(np.int64)
    tables = np.arange(len(new) * 7, dtype=np.int64).reshape(-1, 7)
    plan = schedule(starts, contexts, tables, len(decodes), None, Geometry(12, 4, 10))
    numbers, sequences = plan.numbers, len(new)
    assert numbers[1] == 7
    assert numbers[HEADER : HEADER + sequences + 1].tolist() == starts.tolist()
    at = plan.context_lens_at
    assert numbers[at : at + sequences].tolist() == contexts.tolist()
    num_tiles = plan.num_decodes + plan.num_chunk_tiles
    assert plan.tiles_at + 2 * num_tiles == plan.tables_at
    assert numbers[plan.tables_at :].tolist() == tables.reshape(-1).tolist()


@given(
    visible=st.lists(st.integers(1, 200_000), min_size=1, max_size=64),
    kv_heads=st.sampled_from([1, 3, 8, 32]),
    processors=st.integers(1, 200),
)
def test_a_fixed_number_of_splits_reaches_every_key(
    visible: list[int], kv_heads: int, processors: int
) -> None:
    count, geometry = len(visible), Geometry(kv_heads, kv_heads, processors)
    num_splits = most_splits(count, 200_000, geometry)
    tables = np.zeros((count, 1), np.int64)
    plan = schedule(
        np.arange(count + 1), np.array(visible), tables, count, None, geometry, num_splits
    )
    split = plan.numbers[0]
    assert plan.num_splits == num_splits
    assert split % MIN_SPLIT == 0
    assert num_splits * split >= max(visible)
    assert split == MIN_SPLIT or num_splits * (split - MIN_SPLIT) < max(visible)
    assert num_splits == 1 or count * kv_heads * num_splits <= processors * PROGRAMS_PER_PROCESSOR
