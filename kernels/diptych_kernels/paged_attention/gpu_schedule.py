"""Divides the attention of a step into programs of the GPU kernel.

A program computes one tile (some consecutive new tokens of one sequence, with all query heads that
share a key head, so that they share its loads) and one key head. Decodes, whose tiles hold a single
token, are divided along the keys as well ("split-KV", as Flash-Decoding: Dao, Haziza, Massa and
Sizov, 2023). Otherwise a few long contexts would leave most of the GPU idle. This module performs
no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

TILE_ROWS: Final = 128
"""Rows of a prefill's tile: tokens times query heads of a key head."""
MIN_ROWS: Final = 16
"""The fewest rows of a matrix product on tensor cores."""
MIN_SPLIT: Final = 256
"""The fewest keys of a split: writing and reading its partial result costs 1/32 of reading them
(bf16, four query heads per key head)."""
HEADER: Final = 2
"""The number of values before the others: keys of a split, and the width of a block table."""
PROGRAMS_PER_PROCESSOR: Final = 4
"""Splits are as large as possible while this many programs run on each multiprocessor."""


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
        """The tokens of a prefill's tile."""
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
    """The number of decodes, whose tiles come first."""
    num_chunk_tiles: int
    num_splits: int
    """The number of splits for which programs are started; at least those of the longest decode."""


def schedule(
    query_starts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    block_tables: NDArray[np.int64],
    num_decodes: int,
    window: int | None,
    geometry: Geometry,
    num_splits: int | None = None,
) -> Schedule:
    """Divide a step; the arguments are those of `AttentionMetadata`.

    num_splits: the number of splits; None: as many as fill the device.
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
    """Return [tiles, 2]: for each tile its sequence and its first token, counted from the
    sequence's first new one. Decodes come first. A sequence's last tile, which reads the most keys,
    starts first."""
    tiles = [(sequence, 0) for sequence in range(num_decodes)]
    counts = np.diff(query_starts).tolist()
    for sequence in range(num_decodes, len(counts)):
        firsts = range(0, counts[sequence], tile_tokens)
        tiles += [(sequence, first) for first in reversed(firsts)]
    return np.array(tiles, np.int64).reshape(-1, 2)


def keys_per_split(visible: NDArray[np.int64], geometry: Geometry) -> int:
    """Return the most keys that a program of a decode reads, a power of two.

    visible: [decodes], the keys that each decode sees.
    """
    programs = geometry.processors * PROGRAMS_PER_PROCESSOR
    share = int(visible.sum()) * geometry.kv_heads // programs
    return max(MIN_SPLIT, 1 << max(share, 1).bit_length() - 1)


def most_splits(num_decodes: int, longest: int, geometry: Geometry) -> int:
    """Return as many splits as fill the device with this many decodes, whatever their lengths up to
    `longest`."""
    programs = geometry.processors * PROGRAMS_PER_PROCESSOR
    wanted = programs // (num_decodes * geometry.kv_heads)
    return max(1, min(wanted, -(-longest // MIN_SPLIT)))
