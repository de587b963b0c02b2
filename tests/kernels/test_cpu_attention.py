"""The attention kernel for CPUs against dense attention, and what must not change its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit.attention_batch import Batch
from torch import Tensor

from diptych_kernels.native.decode_batch import PARTITION
from diptych_kernels.paged_attention import AttentionMetadata, cpu, paged_attention, reference
from diptych_kernels.trust import is_there

pytestmark = pytest.mark.usefixtures("compiled_level")
both_caches = pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


kv_dtypes = st.sampled_from([torch.float32, torch.bfloat16])
decodes = st.lists(st.integers(1, 3 * PARTITION).map(lambda context: (context, 1)), max_size=5)
chunks = st.lists(
    st.tuples(st.integers(2, 100), st.integers(2, 100)).map(lambda pair: (max(pair), min(pair))),
    max_size=2,
)


@settings(max_examples=40)
@given(
    sequences=st.tuples(decodes, chunks).map(lambda both: both[0] + both[1]).filter(bool),
    window=st.none() | st.integers(1, 2 * PARTITION),
    block_size=st.sampled_from([1, 3, 4, 16, 128]),
    sharing=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([6, 16, 32, 64]),
    kv_dtype=kv_dtypes,
    has_sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 1.5]),
)
def test_equals_dense_attention(
    sequences: list[tuple[int, int]],
    window: int | None,
    block_size: int,
    sharing: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    has_sinks: bool,
    softcap: float,
) -> None:
    batch = Batch(
        sequences,
        has_sinks=has_sinks,
        softcap=softcap,
        kv_dtype=kv_dtype,
        window=window,
        block_size=block_size,
        heads=sharing * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    assert cpu.fits(batch.queries, batch.kv_layer)
    batch.check(paged_attention, atol=1e-5 if kv_dtype is torch.float32 else 3e-2)
    batch.check(rounding, atol=3e-2)
    batch.check(reference.paged_attention)


def rounding(*args: Any, **options: Any) -> Tensor:
    """Chunks in bfloat16, where there is a matrix unit."""
    return paged_attention(*args, may_round=True, **options)


@both_caches
def test_chunks_are_multiplied_in_the_type_of_the_cache(kv_dtype: torch.dtype) -> None:
    """Where a processor multiplies pairs of bfloat16, they take half the time of float32."""
    in_pairs = kv_dtype is torch.bfloat16 and is_there("bf16_prefill_attention")
    expected = "bf16_prefill_attention" if in_pairs else "prefill_attention"
    assert cpu.chunk_kernel(64, kv_dtype, may_round=False).name == expected


def _alone(batch: Batch, index: int) -> Tensor:
    """What a decode yields in a step of its own."""
    metadata = batch.metadata
    own = AttentionMetadata(
        query_starts=metadata.query_starts[:2],
        context_lens=metadata.context_lens[index : index + 1],
        block_tables=metadata.block_tables[index : index + 1],
        num_decodes=1,
        block_size=metadata.block_size,
        window=metadata.window,
    )
    return paged_attention(batch.queries[index : index + 1], batch.kv_layer, own)[0]


@both_caches
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_neighbours_nor_threads_change_a_result(
    threads: int, kv_dtype: torch.dtype
) -> None:
    contexts = [(context, 1) for context in (200, 1, 64, 65, 130, 7)]
    batch = Batch(contexts, block_size=16, head_dim=32, kv_dtype=kv_dtype)
    together = paged_attention(batch.queries, batch.kv_layer, batch.metadata)
    torch.set_num_threads(threads)
    for index, attended in enumerate(together):
        assert torch.equal(attended, _alone(batch, index))


@both_caches
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_a_nan_reaches_its_own_sequence_and_no_other(half: int, kv_dtype: torch.dtype) -> None:
    sequences = [(70, 1), (90, 1), (20, 1)]
    batch = Batch(sequences, garbage=float("nan"), head_dim=32, kv_dtype=kv_dtype)
    block = batch.metadata.block_tables[1, 66 // 4]
    batch.kv_layer[block, half, 66 % 4] = torch.nan
    attended = paged_attention(batch.queries, batch.kv_layer, batch.metadata)
    assert attended[1].isnan().all()
    assert attended[[0, 2]].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    batch = Batch([(150, 1), (3, 1)])
    batch.queries *= 1e4
    batch.check(paged_attention)


def test_queries_may_be_a_part_of_a_fused_projection() -> None:
    batch = Batch([(9, 1), (12, 1), (12, 4)])
    fused = torch.cat((batch.queries, torch.full_like(batch.queries, torch.nan)), dim=1)
    batch.queries = fused[:, : batch.queries.shape[1]]
    assert cpu.fits(batch.queries, batch.kv_layer)
    batch.check(paged_attention)


def test_other_types_and_layouts_go_to_the_reference() -> None:
    halves = Batch([(21, 1), (17, 6)], dtype=torch.bfloat16)
    assert not cpu.fits(halves.queries, halves.kv_layer)
    halves.check(paged_attention, atol=3e-2)
    turned = Batch([(21, 1), (17, 6)])
    turned.kv_layer = turned.kv_layer.transpose(2, 3).contiguous().transpose(2, 3)
    assert not cpu.fits(turned.queries, turned.kv_layer)
    turned.check(paged_attention)


@both_caches
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (70, False), (70, True)])
@pytest.mark.parametrize("attend", [paged_attention, rounding])
def test_how_a_prompt_is_cut_changes_no_bit(
    attend: Callable[..., Tensor], window: int | None, has_sinks: bool, kv_dtype: torch.dtype
) -> None:
    """Tokens come in chunks of several; the last one comes alone, as decodes do."""
    whole = Batch(
        [(150, 150)],
        block_size=16,
        window=window,
        has_sinks=has_sinks,
        head_dim=64,
        kv_dtype=kv_dtype,
    )
    metadata, attend = whole.metadata, partial(attend, sinks=whole.sinks)
    expected = attend(whole.queries, whole.kv_layer, metadata)
    ends = [7, 64, 100, 149]
    for start, end in pairwise([0, *ends]):
        chunk = AttentionMetadata(
            query_starts=np.array([0, end - start]),
            context_lens=np.array([end]),
            block_tables=metadata.block_tables,
            num_decodes=0,
            block_size=16,
            window=window,
        )
        own = attend(whole.queries[start:end], whole.kv_layer, chunk)
        assert torch.equal(own, expected[start:end])


@both_caches
@pytest.mark.parametrize("attend", [paged_attention, rounding])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_a_nan_reaches_the_tokens_of_a_chunk_that_see_it(
    attend: Callable[..., Tensor], half: int, kv_dtype: torch.dtype
) -> None:
    batch = Batch([(90, 90), (40, 40)], head_dim=64, kv_dtype=kv_dtype)
    block = batch.metadata.block_tables[0, 66 // 4]
    batch.kv_layer[block, half, 66 % 4] = torch.nan
    attended = attend(batch.queries, batch.kv_layer, batch.metadata)
    assert attended[66:90].isnan().all()
    assert attended[90:].isfinite().all()
