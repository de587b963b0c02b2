"""Blocks of one geometry become blocks of another: every token keeps its KV, and its position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.repack import Shards, pieces, repack
from diptych_kv_transfer.memory.shard import Shard

BLOCK_SIZES = st.sampled_from([1, 3, 16, 32, 128])
RANKS = st.sampled_from([1, 2, 4])
Tokens = NDArray[np.uint8]
"""[tokens, layers, 2, heads, row_bytes]"""


def as_tokens(memory: list[NDArray[np.uint8]], layout: Layout, blocks: list[int]) -> Tokens:
    """The plain reference: read an engine's memory token by token and head by head."""
    found = np.zeros(
        (len(blocks) * layout.block_size, layout.num_layers, 2, layout.kv_heads, layout.row_bytes),
        np.uint8,
    )
    shape = (
        layout.num_layers, 2, layout.block_size, layout.local_heads, layout.row_bytes,
    )  # fmt: skip
    for token in range(len(found)):
        block, offset = blocks[token // layout.block_size], token % layout.block_size
        for rank, shard in enumerate(memory):
            for local, head in enumerate(layout.heads_of(rank)):
                found[token, :, :, head] = shard[block].reshape(shape)[:, :, offset, local]
    return found


def of(memory: list[NDArray[np.uint8]]) -> Shards:
    return [Shard.of(blocks) for blocks in memory]


def random_memory(layout: Layout, num_blocks: int, seed: int) -> list[NDArray[np.uint8]]:
    """What an engine with these tokens has: ranks that share a head agree on it."""
    random = np.random.default_rng(seed)
    shape = (
        num_blocks, layout.num_layers, 2, layout.block_size, layout.kv_heads, layout.row_bytes,
    )  # fmt: skip
    whole = random.integers(1, 256, shape, np.uint8)
    return [
        np.ascontiguousarray(whole[..., list(layout.heads_of(rank)), :]).reshape(num_blocks, -1)
        for rank in range(layout.num_ranks)
    ]


@given(
    sizes=st.tuples(BLOCK_SIZES, BLOCK_SIZES),
    ranks=st.tuples(RANKS, RANKS),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4, 8]),
    num_tokens=st.integers(1, 200),
    cached_blocks=st.integers(0, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_token_keeps_its_kv(
    sizes: tuple[int, int],
    ranks: tuple[int, int],
    layers: int,
    heads: int,
    num_tokens: int,
    cached_blocks: int,
    seed: int,
) -> None:
    source_layout, target_layout = (
        Layout(layers, heads, 2, size, num) for size, num in zip(sizes, ranks, strict=True)
    )
    cached = min(cached_blocks, (num_tokens - 1) // target_layout.block_size)
    start = cached * target_layout.block_size
    num_source = source_layout.blocks_for(num_tokens)
    source = random_memory(source_layout, num_source, seed)
    staged = [shard[start // source_layout.block_size :] for shard in source]
    num_target = target_layout.blocks_for(num_tokens)
    target = random_memory(target_layout, num_target + 3, seed + 1)
    before = [shard.copy() for shard in target]
    order = np.random.default_rng(seed).permutation(num_target + 3).tolist()
    blocks, others = order[:num_target], order[num_target:]

    repack(of(staged), source_layout, of(target), target_layout, blocks[cached:], start, num_tokens)

    wanted = as_tokens(source, source_layout, list(range(num_source)))[start:num_tokens]
    found = as_tokens(target, target_layout, blocks)
    np.testing.assert_array_equal(found[start:num_tokens], wanted)
    assert not found[num_tokens:].any()
    for block in others + blocks[:cached]:
        assert all(
            (now[block] == then[block]).all() for now, then in zip(target, before, strict=True)
        )


@given(
    sizes=st.tuples(BLOCK_SIZES, BLOCK_SIZES), start=st.integers(0, 500), count=st.integers(0, 500)
)
def test_pieces_cover_every_token_once_and_in_order(
    sizes: tuple[int, int], start: int, count: int
) -> None:
    source_size, target_size = sizes
    source, target = [], []
    for piece in pieces(start, start + count, source_size, target_size):
        assert piece.tokens > 0
        assert piece.source_offset + piece.tokens <= source_size
        assert piece.target_offset + piece.tokens <= target_size
        for index in range(piece.tokens):
            source.append(piece.source_block * source_size + piece.source_offset + index)
            target.append(piece.target_block * target_size + piece.target_offset + index)
    assert [token - start % source_size for token in source] == list(range(count))
    assert [token - start % target_size for token in target] == list(range(count))


COMPAT: dict[str, str | int] = {
    "num_layers": 2, "kv_heads": 4, "head_dim": 8, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_layout_knows_a_ranks_part_of_a_block(ranks: int) -> None:
    layout = Layout.of(COMPAT, {"block_size": 16, "tensor_parallel_size": ranks})
    assert layout is not None
    assert layout.block_bytes == 2 * 2 * 16 * max(1, 4 // ranks) * 8 * 2
    heads = [head for rank in range(ranks) for head in layout.heads_of(rank)]
    assert sorted(set(heads)) == [0, 1, 2, 3]
    assert heads == sorted(heads)


@pytest.mark.parametrize(
    ("compat", "geometry"),
    [
        (COMPAT, {}),
        (COMPAT, {"block_size": 16}),
        (COMPAT, {"block_size": 0, "tensor_parallel_size": 1}),
        (COMPAT, {"block_size": 16, "tensor_parallel_size": 3}),
        (COMPAT | {"dtype": "float4"}, {"block_size": 16, "tensor_parallel_size": 1}),
        (COMPAT | {"num_layers": "two"}, {"block_size": 16, "tensor_parallel_size": 1}),
        ({}, {"block_size": 16, "tensor_parallel_size": 1}),
    ],
)
def test_no_layout_is_made_up(compat: dict[str, str | int], geometry: dict[str, int]) -> None:
    assert Layout.of(compat, geometry) is None
