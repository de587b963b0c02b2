"""Copies KV from one engine's blocks into another's where their geometry differs.

It only changes the target's blocks. It moves bytes, so it works for every dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.shard import Shard

Shards = Sequence[Shard]
"""One engine's KV memory in the host, by rank, in blocks of `layout.block_bytes`."""


class Piece(NamedTuple):
    """Contiguous tokens that lie in one block on either side."""

    source_block: int
    source_offset: int
    target_block: int
    target_offset: int
    tokens: int


def pieces(start: int, end: int, source_size: int, target_size: int) -> Iterator[Piece]:
    """Cut tokens `start` to `end` where either side's blocks end.

    Blocks are counted from the one that holds token `start`, on each side.
    """
    first_source, first_target = start // source_size, start // target_size
    while start < end:
        source_block, source_offset = divmod(start, source_size)
        target_block, target_offset = divmod(start, target_size)
        count = min(source_size - source_offset, target_size - target_offset, end - start)
        yield Piece(
            source_block - first_source,
            source_offset,
            target_block - first_target,
            target_offset,
            count,
        )
        start += count


def repack(
    source: Shards,
    source_layout: Layout,
    target: Shards,
    target_layout: Layout,
    target_blocks: Sequence[int],
    start: int,
    end: int,
) -> None:
    """Copy the KV of tokens `start` to `end` into the target's blocks, and zero what is behind.

    Args:
        source: blocks in order; the first is the one that holds token `start`.
        target_blocks: ids of the target's blocks, in order; `start` is the first one's first token.

    The layouts are of one model. The rest of the target stays, such as its tokens before `start`.
    """
    cuts = list(pieces(start, end, source_layout.block_size, target_layout.block_size))
    filled = (end - start) % target_layout.block_size
    for target_rank, target_shard in enumerate(target):
        into = _tokens_of(target_shard, target_layout)
        wanted = target_layout.heads_of(target_rank)
        for source_rank, source_shard in enumerate(source):
            there = source_layout.heads_of(source_rank)
            common = range(max(wanted.start, there.start), min(wanted.stop, there.stop))
            if not common:
                continue
            take = slice(common.start - there.start, common.stop - there.start)
            put = slice(common.start - wanted.start, common.stop - wanted.start)
            out = _tokens_of(source_shard, source_layout)
            for block, offset, target_index, target_offset, tokens in cuts:
                into[
                    target_blocks[target_index], :, :, target_offset : target_offset + tokens, put
                ] = out[block, :, :, offset : offset + tokens, take]
        if filled:
            into[target_blocks[target_layout.blocks_for(end - start) - 1], :, :, filled:] = 0


def _tokens_of(shard: Shard, layout: Layout) -> NDArray[np.uint8]:
    """[blocks, layers, 2, block_size, heads, row_bytes]: the same memory with its shape."""
    return shard.array().reshape(
        -1, layout.num_layers, 2, layout.block_size, layout.local_heads, layout.row_bytes
    )
