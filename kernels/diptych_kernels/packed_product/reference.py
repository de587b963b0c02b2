"""The packed product in torch's operators."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from diptych_kernels.native.tile_layout import (
    BF16,
    BYTE,
    E4M3,
    F16,
    GROUP,
    LEVEL_BITS,
    LOW_BITS,
    QUAD,
    QUADS,
    SPANS,
    TILE_ROWS,
    TOP,
    WORD_BITS,
    group_bytes,
    top_bit,
)

MAX_HALF: Final = torch.finfo(torch.float16).max
LARGER: Final = 1 + math.log(2) / 256
"""Compensates for truncation, as `native.unpacked_tile` does."""
SMALLEST: Final = torch.finfo(torch.float32).tiny
FLOATS: Final = {torch.bfloat16: BF16, torch.float16: F16, torch.float8_e4m3fn: E4M3}
"""The kinds of tiles of floats by the types of their tensors."""
NAN: Final = 0x7F
"""The bits of an 8-bit float (e4m3) that is none, without its sign."""
POWER: Final = 2.0**8
"""What kernels leave out of 8-bit floats is in their scales."""
TILES_AT_ONCE: Final = 64
"""Tiles that are filled at once: the memory for intermediate results is small."""
LOW: Final = (1 << LOW_BITS) - 1
BITS_OF: Final = {group_bytes(bits): bits for bits in LEVEL_BITS}


def _stored(levels: Tensor, bits: int) -> Tensor:
    """[rows, groups, 32] uint8 -> [rows, groups, bytes] uint8, in the order of `tile_layout`."""
    if bits == BYTE:
        return levels
    rows, groups, _ = levels.shape
    first, second = levels.chunk(2, -1)
    stored = first & LOW | (second & LOW) << LOW_BITS
    if bits == LOW_BITS:
        return stored
    tops = torch.zeros(rows, groups, 2, QUAD, dtype=torch.uint8)
    for quad, own in enumerate(levels.view(rows, groups, QUADS, QUAD).unbind(2)):
        tops[:, :, quad % 4 // 2] |= own >> LOW_BITS << top_bit(quad)
    return torch.cat([stored, tops.flatten(2)], -1)


def _levels(stored: Tensor, bits: int) -> Tensor:
    """[rows, groups, bytes] uint8 -> [rows, groups, 32] uint8."""
    if bits == BYTE:
        return stored
    low, tops = stored[..., : GROUP // 2], stored[..., GROUP // 2 :]
    levels = torch.cat([low & LOW, low >> LOW_BITS], -1)
    if bits > LOW_BITS:
        for quad, own in enumerate(levels.view(*levels.shape[:2], QUADS, QUAD).unbind(2)):
            vector = tops[..., quad % 4 // 2 * QUAD :][..., :QUAD]
            own |= (vector >> top_bit(quad) & TOP) << LOW_BITS
    return levels


def to_tiles(levels: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor | None:
    """A matrix of the values `level * scale + offset` as [tiles, groups, bytes] uint8.

    levels: [rows, columns] uint8, of at most `bits` bits, one of `LEVEL_BITS`.
    scale, offset: [rows, columns / span] float32, rounded to float16; a span is 16 or 32 columns,
    and no smaller than that of the tiles.
    None if the rows fill no tiles, or float16 cannot hold a factor.
    """
    rows, columns = levels.shape
    largest = torch.maximum(scale.abs().amax(), offset.abs().amax())
    if rows % TILE_ROWS or not float(largest) <= MAX_HALF:
        return None
    tiles = levels.new_empty(rows // TILE_ROWS, columns // GROUP, group_bytes(bits))
    for first in range(0, len(tiles), TILES_AT_ONCE):
        own = slice(first * TILE_ROWS, (first + TILES_AT_ONCE) * TILE_ROWS)
        _fill(tiles[first : first + TILES_AT_ONCE], levels[own], scale[own], offset[own], bits)
    return tiles


def _fill(tiles: Tensor, levels: Tensor, scale: Tensor, offset: Tensor, bits: int) -> None:
    num_tiles, groups, _ = tiles.shape
    spans = GROUP // SPANS[bits]
    stored = _stored(levels.reshape(-1, groups, GROUP), bits).contiguous().view(torch.int32)
    quads = stored.view(num_tiles, TILE_ROWS, groups, -1).permute(0, 2, 3, 1)
    num_quads = quads.shape[2]
    places = tiles.view(torch.int32)[:, :, : TILE_ROWS * num_quads]
    places.view(num_tiles, groups, num_quads, TILE_ROWS).copy_(quads)
    halves = tiles.view(torch.float16)[:, :, -spans * 2 * TILE_ROWS :]
    halves = halves.view(num_tiles, groups, spans, 2, TILE_ROWS)
    for index, factor in enumerate((scale, offset)):
        own = factor.repeat_interleave(groups * spans // factor.shape[1], 1)
        own = own.view(num_tiles, TILE_ROWS, groups, spans).permute(0, 2, 3, 1)
        halves[:, :, :, index].copy_(own)


def to_float_tiles(values: Tensor, scale: Tensor | None = None) -> Tensor | None:
    """A matrix of floats as [tiles, groups, 512 or more] of the same type, one of `FLOATS`.

    values: [rows, columns]. scale: [rows, columns / 32] float32, of 8-bit floats only.
    None if the rows fill no tiles, or a number is not finite.
    """
    rows, columns = values.shape
    if rows % TILE_ROWS or columns % GROUP or not are_finite(values, scale):
        return None
    shape = rows // TILE_ROWS, TILE_ROWS, columns // GROUP, GROUP
    tiles = values.view(shape).permute(0, 2, 3, 1).flatten(2)
    if scale is None:
        return tiles.contiguous()
    scales = (scale * POWER).view(shape[:3]).transpose(1, 2).contiguous()
    return torch.cat([tiles.view(torch.uint8), scales.view(torch.uint8)], 2).view(values.dtype)


def are_finite(values: Tensor, scale: Tensor | None) -> bool:
    """Whether all floats are, and their scales in a kernel."""
    if scale is not None and not (scale * POWER).isfinite().all():
        return False
    if values.dtype is torch.float8_e4m3fn:
        return not bool(((values.view(torch.uint8) & NAN) == NAN).any())
    return bool(values.isfinite().all())


def kind_of(tiles: Tensor) -> int:
    """Return the number of the kernels for these tiles: the bits of their levels, or the kind of
    their floats."""
    return FLOATS.get(tiles.dtype) or BITS_OF[tiles.shape[2]]


def rows_of(tiles: Tensor, rows: Tensor) -> Tensor:
    """As `diptych_kernels.packed_product.rows_of`."""
    if tiles.dtype in FLOATS:
        return _float_rows(tiles, rows)
    num_tiles, groups, _ = tiles.shape
    bits = kind_of(tiles)
    spans = GROUP // SPANS[bits]
    tile, row = rows // TILE_ROWS, rows % TILE_ROWS
    # After the quads of levels, two rows of factors in float16 are as long as one of quads.
    quads = tiles.view(torch.int32).view(num_tiles, groups, -1, TILE_ROWS)
    halves = tiles.view(torch.float16).view(num_tiles, groups, -1, TILE_ROWS)
    levels = _levels(quads[tile, :, :-spans, row].contiguous().view(torch.uint8), bits)
    factors = halves[tile, :, -2 * spans :, row].float().view(len(rows), groups, spans, 2, 1)
    levels = levels.view(len(rows), groups, spans, SPANS[bits])
    return (levels * factors[..., 0, :] + factors[..., 1, :]).view(len(rows), -1)


def _float_rows(tiles: Tensor, rows: Tensor) -> Tensor:
    num_tiles, groups, _ = tiles.shape
    tile, row = rows // TILE_ROWS, rows % TILE_ROWS
    numbers = tiles[:, :, : GROUP * TILE_ROWS].view(num_tiles, groups, GROUP, TILE_ROWS)
    values = numbers.float()[tile, :, :, row]
    if tiles.shape[2] > GROUP * TILE_ROWS:
        scales = tiles[:, :, GROUP * TILE_ROWS :].view(torch.float32)
        values *= scales[tile, :, row][..., None] / POWER
    return values.view(len(rows), -1)


def values_of(tiles: Tensor) -> Tensor:
    """Return the whole matrix: [rows, columns] float32, as `rows_of`."""
    return rows_of(tiles, torch.arange(tiles.shape[0] * TILE_ROWS))


def packed_product(
    x: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    num_decodes: int,
    add: bool = False,
    input_bits: int = WORD_BITS,
) -> None:
    """As `diptych_kernels.packed_product.packed_product` with a matrix unit."""
    matrix = values_of(tiles).t()
    if tiles.dtype in FLOATS:
        product = x.mm(matrix)
        out.copy_(out + product if add else product)
        return
    decodes = rounded(x[:num_decodes], input_bits).mm(matrix)
    chunks = x[num_decodes:].bfloat16().float().mm(cut_off(matrix))
    product = torch.cat([decodes, chunks])
    out.copy_(out + product if add else product)


def cut_off(matrix: Tensor) -> Tensor:
    """Truncate float32 to bfloat16, after adding what truncation takes on average."""
    return ((matrix * LARGER).view(torch.int32) & -0x10000).view(torch.float32)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Round [rows, columns] to so many bits per value, with one scale for 32 of them."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / ((1 << bits - 1) - 1)
    levels = (groups / scale.clamp(min=SMALLEST)).round()
    return (levels * scale).view(x.shape)
