"""The layout of a packed matrix in a GPU's memory, in the order in which its kernel reads it.

A block is 128 columns of all rows. It holds, one after the other:

    levels    [rows, span] words; word j has, from bit `b * i` on, the level of column j of lane i,
              which is `span` columns
    tops      the two highest bits of 6-bit levels, whose other four are in `levels`: words like
              those, but with lanes 0, 4, 1, 5, 2, 6, 3 and 7 in their order
    factors   [128 / span, rows] words: scale and offset in float16; of 8-bit floats, whose words
              are like those of 8-bit levels, a scale in float32

So a program finds what it wants of neighbouring rows side by side, and one word of factors serves a
whole span. Kinds of levels and their spans are those of `tile_layout`. Columns are filled up to
whole blocks with zeros.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych_kernels.native.tile_layout import BYTE, LOW_BITS, SPANS
from diptych_kernels.packed_product.reference import LOW, MAX_HALF, POWER, are_finite

COLUMNS: Final = 128
"""A block has so many."""
WORD_BYTES: Final = 4
"""Size of the factors of a span."""
UNPACKED_BYTES: Final = 128 << 20
"""Most memory for a part of a matrix that is unpacked, for a product of many rows."""
FLOAT8: Final = torch.float8_e4m3fn


def row_bytes(bits: int) -> int:
    """Size, in bytes, of a row of a block whose levels have `bits` bits."""
    return COLUMNS * bits // 8 + COLUMNS // SPANS[bits] * WORD_BYTES


BITS_OF: Final = {row_bytes(bits): bits for bits in SPANS}


def bits_of(tiles: Tensor) -> int:
    """Return the size of the levels, or floats."""
    return BITS_OF[tiles.shape[2]]


def to_gpu_tiles(levels: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor | None:
    """A matrix as [blocks, rows, bytes] uint8, on the device of `levels`; the arguments are those
    of `to_tiles`, but a span is that of the tiles. None if float16 cannot hold a factor."""
    largest = torch.maximum(scale.abs().amax(), offset.abs().amax())
    if not float(largest) <= MAX_HALF:
        return None
    lanes = _lanes(levels, bits)
    planes = [_plane(lanes, bits)]
    if bits not in (LOW_BITS, BYTE):
        halves = (lanes >> LOW_BITS).chunk(2, 2)
        tops = torch.stack(halves, 3).flatten(2, 3)
        planes = [_plane(lanes & LOW, LOW_BITS), _plane(tops, bits - LOW_BITS)]
    factors = torch.stack([scale.half(), offset.half()], -1).view(torch.int32).squeeze(-1)
    return _tiles(planes, factors, lanes)


def to_gpu_float_tiles(values: Tensor, scale: Tensor) -> Tensor | None:
    """A matrix [rows, columns] of 8-bit floats, with a scale [rows, columns / 32] float32, as
    [blocks, rows, bytes] of their type. None if a number is not finite."""
    if not are_finite(values, scale):
        return None
    lanes = _lanes(values.view(torch.uint8), BYTE)
    factors = (scale * POWER).contiguous().view(torch.int32)
    return _tiles([_plane(lanes, BYTE)], factors, lanes).view(values.dtype)


def with_rows(tiles: Tensor, start: int, new: Tensor) -> Tensor:
    """A copy in which rows from one on are those of a smaller matrix of the same columns."""
    copy = tiles.clone()
    last = start + new.shape[1]
    for part, own in zip(_by_row(copy), _by_row(new), strict=True):
        part[:, start:last] = own
    return copy


def _by_row(tiles: Tensor) -> list[Tensor]:
    """Views of the parts of all blocks, each [blocks, rows, ...] uint8."""
    blocks, rows, _ = tiles.shape
    bits = bits_of(tiles)
    sizes = [bits] if bits in (LOW_BITS, BYTE) else [LOW_BITS, bits - LOW_BITS]
    planes = [rows * COLUMNS * size // BYTE for size in sizes]
    spans = COLUMNS // SPANS[bits]
    flat = tiles.view(torch.uint8).flatten(1)
    *parts, factors = torch.split(flat, [*planes, rows * spans * WORD_BYTES], 1)
    of_rows = factors.view(blocks, spans, rows, WORD_BYTES).transpose(1, 2)
    return [*(part.view(blocks, rows, -1) for part in parts), of_rows]


def _lanes(levels: Tensor, bits: int) -> Tensor:
    """[rows, columns] uint8 -> [rows, blocks, 128 / span, span]: what shares a word, one below the
    other."""
    rows, columns = levels.shape
    filled = F.pad(levels, (0, -columns % COLUMNS))
    return filled.reshape(rows, -1, COLUMNS // SPANS[bits], SPANS[bits])


def _plane(lanes: Tensor, bits: int) -> Tensor:
    """Lanes of `bits` bits -> [blocks, bytes of all rows] uint8: a word for each place in a lane,
    the first lane in its lowest bits."""
    together = BYTE // bits
    words = lanes[:, :, ::together].clone()
    for number in range(1, together):
        words |= lanes[:, :, number::together] << bits * number
    return words.permute(1, 0, 3, 2).flatten(1)


def _tiles(planes: list[Tensor], factors: Tensor, lanes: Tensor) -> Tensor:
    """Planes and factors [rows, spans] int32, one after the other in each block."""
    rows, blocks, own, _ = lanes.shape
    filled = F.pad(factors, (0, blocks * own - factors.shape[1]))
    of_blocks = filled.view(rows, blocks, own).permute(1, 2, 0).contiguous()
    return torch.cat([*planes, of_blocks.view(torch.uint8).flatten(1)], 1).view(blocks, rows, -1)
