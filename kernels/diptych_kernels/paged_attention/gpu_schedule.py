"""How the attention of a step is cut into programs of the GPU kernel. Pure.

A program works on one tile (some consecutive new tokens of one sequence, with all query heads that
share a key head, so that they share its loads) and on one key head. Decodes, whose tiles hold a
single token, are cut along the keys as well ("split-KV", as Flash-Decoding: Dao, Haziza, Massa and
Sizov, 2023), or a few long contexts would leave most of the GPU idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

TILE_ROWS: Final = 128
"""Rows (tokens times query heads of a key head) of a prefill's tile."""
MIN_ROWS: Final = 16
"""The least rows of a matrix product on tensor cores."""
MIN_SPLIT: Final = 256
"""Keys of a split, at least: to write and read its partial result costs 1/32 of reading them (bf16,
four query heads a key head)."""
HEADER: Final = 2
"""Numbers before the others: keys of a split, and the width of a block table."""
PROGRAMS_PER_PROCESSOR: Final = 4
"""Splits are as large as they can be while this many programs run on each multiprocessor."""


@dataclass(slots=True, frozen=True)
class Geometry:
    """The shape of a model's attention, and the device it runs on."""

    heads: int
    kv_heads: int
    processors: int
    """Multiprocessors of the device."""

    @property
    def sharing(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.kv_heads

    @property
    def tile_tokens(self) -> int:
        """Tokens of a prefill's tile."""
        return max(1, TILE_ROWS // self.sharing)


@dataclass(slots=True, frozen=True)
class Schedule:
    """The numbers of one step that all layers' kernels read, packed for one copy to the device."""

    numbers: NDArray[np.int32]
    """Keys of a decode's split, the width of a block table; [sequences + 1] query starts,
    [sequences] context lengths, [tiles, 2] tiles (a sequence, and the tile's first new token),
    [sequences, width] block tables."""
    context_lens_at: int
    tiles_at: int
    tables_at: int
    num_decodes: int
    """The first tiles are those of decodes."""
    num_chunk_tiles: int
    num_splits: int
    """That programs are started for; at least those of the longest decode."""


def schedule(
    query_starts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_tables: NDArray[np.int64],
    num_decodes: int,
    window: int | None,
    geometry: Geometry,
    num_splits: int | None = None,
) -> Schedule:
    """Cut a step; its arguments are those of `AttentionMetadata`.

    num_splits: as many as there must be; None: what fills the device.
    """
    tiles = cut_tiles(query_starts, num_decodes, geometry.tile_tokens)
    visible = context_lens[:num_decodes]
    if window is not None:
        visible = np.minimum(visible, window)
    longest = int(visible.max(initial=0))
    if num_splits is None:
        split = keys_per_split(visible, geometry)
        num_splits = -(-longest // split)
    else:
        split = MIN_SPLIT * max(1, -(-longest // (num_splits * MIN_SPLIT)))
    header = np.array([split, block_tables.shape[1]])
    parts = (header, query_starts, context_lens, tiles.reshape(-1), block_tables.reshape(-1))
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return Schedule(
        numbers=np.concatenate(parts, dtype=np.int32, casting="same_kind"),
        context_lens_at=ends[1],
        tiles_at=ends[2],
        tables_at=ends[3],
        num_decodes=num_decodes,
        num_chunk_tiles=len(tiles) - num_decodes,
        num_splits=num_splits,
    )


def cut_tiles(
    query_starts: NDArray[np.int64], num_decodes: int, tile_tokens: int
) -> NDArray[np.int64]:
    """[tiles, 2]: of each tile its sequence and its first token, counted from the sequence's first
    new one. Decodes come first; a sequence's last tile, which sees the most keys, starts first."""
    tiles = [(sequence, 0) for sequence in range(num_decodes)]
    counts = np.diff(query_starts).tolist()
    for sequence in range(num_decodes, len(counts)):
        firsts = range(0, counts[sequence], tile_tokens)
        tiles += [(sequence, first) for first in reversed(firsts)]
    return np.array(tiles, np.int64).reshape(-1, 2)


def keys_per_split(visible: NDArray[np.int64], geometry: Geometry) -> int:
    """A power of two: the most keys that a program of a decode reads.

    visible: [decodes], the keys that each sees.
    """
    programs = geometry.processors * PROGRAMS_PER_PROCESSOR
    share = int(visible.sum()) * geometry.kv_heads // programs
    return max(MIN_SPLIT, 1 << max(share, 1).bit_length() - 1)


def most_splits(num_decodes: int, longest: int, geometry: Geometry) -> int:
    """As many as fill the device with so many decodes, whatever their lengths up to `longest`."""
    programs = geometry.processors * PROGRAMS_PER_PROCESSOR
    wanted = programs // (num_decodes * geometry.kv_heads)
    return max(1, min(wanted, -(-longest // MIN_SPLIT)))
