"""Packs a matrix into tiles, and takes it out again; `native/tile_layout.py` says how they lie."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from diptych_kernels.native.tile_layout import (
    FACTOR_BYTES,
    GROUP,
    QUAD,
    QUADS,
    TILE_ROWS,
    group_bytes,
)

MAX_HALF: Final = torch.finfo(torch.float16).max


def to_tiles(levels: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor | None:
    """A matrix of the values `level * scale + offset` as [tiles, groups, bytes] uint8.

    levels: [rows, columns] uint8, below 2^bits; `bits` is 4 or 8.
    scale, offset: [rows, columns / 32] float32, rounded to float16.
    None if the rows fill no tiles, or float16 cannot hold a factor.
    """
    rows, columns = levels.shape
    largest = torch.maximum(scale.abs().amax(), offset.abs().amax())
    if rows % TILE_ROWS or columns % GROUP or not float(largest) <= MAX_HALF:
        return None
    num_tiles, groups = rows // TILE_ROWS, columns // GROUP
    tiles = levels.new_empty(num_tiles, groups, group_bytes(bits))
    quads = levels.contiguous().view(torch.int32).view(num_tiles, TILE_ROWS, groups, QUADS)
    quads = quads.permute(0, 2, 3, 1)
    if bits == 4:
        quads = quads[:, :, : QUADS // 2] | (quads[:, :, QUADS // 2 :] << 4)
    num_bytes = TILE_ROWS * GROUP * bits // 8
    tiles[:, :, :num_bytes] = quads.reshape(num_tiles, groups, -1).view(torch.uint8)
    for index, factor in enumerate((scale, offset)):
        first = num_bytes + index * FACTOR_BYTES // 2
        halves = factor.half().view(num_tiles, TILE_ROWS, groups).transpose(1, 2).contiguous()
        tiles[:, :, first : first + FACTOR_BYTES // 2] = halves.view(torch.uint8)
    return tiles


def values_of(tiles: Tensor) -> Tensor:
    """The matrix again: [rows, columns] float32, bit for bit if float16 holds its factors."""
    num_tiles, groups, num_bytes = tiles.shape
    bits = (num_bytes - FACTOR_BYTES) * 8 // (TILE_ROWS * GROUP)
    levels = tiles[:, :, :-FACTOR_BYTES]
    if bits == 4:
        levels = torch.cat([levels & 15, levels >> 4], 2)
    levels = levels.reshape(num_tiles, groups, QUADS, TILE_ROWS, QUAD)
    levels = levels.permute(0, 3, 1, 2, 4).reshape(num_tiles, TILE_ROWS, groups, GROUP)
    factors = tiles[:, :, -FACTOR_BYTES:].contiguous().view(torch.float16).float()
    scale, offset = factors.transpose(1, 2).view(num_tiles, 2, TILE_ROWS, groups, 1).unbind(1)
    return (levels * scale + offset).reshape(num_tiles * TILE_ROWS, groups * GROUP)
