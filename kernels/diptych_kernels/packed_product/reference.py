"""The packed product in torch's operators."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from diptych_kernels.native.tile_layout import (
    BF16,
    E4M3,
    F16,
    FACTOR_BYTES,
    GROUP,
    QUAD,
    TILE_ROWS,
)

MAX_HALF: Final = torch.finfo(torch.float16).max
LEVELS: Final = 32767
"""Levels on either side of zero."""
LARGER: Final = 1 + math.log(2) / 256
"""Compensates for truncation, as `native.unpacked_tile` does."""
SMALLEST: Final = torch.finfo(torch.float32).tiny
FLOATS: Final = {torch.bfloat16: BF16, torch.float16: F16, torch.float8_e4m3fn: E4M3}
"""The kinds of tiles of floats by the types of their tensors."""
NAN: Final = 0x7F
"""The bits of an 8-bit float (e4m3) that is none, without its sign."""
POWER: Final = 2.0**8
"""What kernels leave out of 8-bit floats is in their scales."""


def levels_of(packed: Tensor, bits: int) -> Tensor:
    """[..., bytes] -> [..., levels] uint8: each byte holds a level of so many bits in each of its
    parts, and the lowest parts of all bytes come first."""
    if bits == 8:
        return packed
    return torch.cat([packed >> first & (1 << bits) - 1 for first in range(0, 8, bits)], -1)


def to_tiles(levels: Tensor, scale: Tensor, offset: Tensor) -> Tensor | None:
    """A matrix of the values `level * scale + offset` as [tiles, groups, bytes] uint8.

    levels: [rows, columns / 32, bytes] uint8, of 4 or 8 bits each. A group of 8-bit levels is 32
    bytes; one of 4-bit levels is 16 bytes, whose low halves are its first 16 columns.
    scale, offset: [rows, columns / 32] float32, rounded to float16.
    None if the rows fill no tiles, or float16 cannot hold a factor.
    """
    rows, groups, size = levels.shape
    largest = torch.maximum(scale.abs().amax(), offset.abs().amax())
    if rows % TILE_ROWS or not float(largest) <= MAX_HALF:
        return None
    num_tiles, quads = rows // TILE_ROWS, size // QUAD
    tiles = levels.new_empty(num_tiles, groups, TILE_ROWS * size + FACTOR_BYTES)
    # Both the group and the tile hold a quad of 4-bit levels beside the one 16 columns further on.
    rows_of_quads = levels.contiguous().view(torch.int32).view(num_tiles, TILE_ROWS, groups, quads)
    places = tiles.view(torch.int32)[:, :, : TILE_ROWS * quads]
    places.view(num_tiles, groups, quads, TILE_ROWS).copy_(rows_of_quads.permute(0, 2, 3, 1))
    halves = tiles.view(torch.float16)[:, :, -2 * TILE_ROWS :].view(num_tiles, groups, 2, TILE_ROWS)
    for index, factor in enumerate((scale, offset)):
        halves[:, :, index].copy_(factor.view(num_tiles, TILE_ROWS, groups).transpose(1, 2))
    return tiles


def to_float_tiles(values: Tensor, scale: Tensor | None = None) -> Tensor | None:
    """A matrix of floats as [tiles, groups, 512 or more] of the same type, one of `FLOATS`.

    values: [rows, columns]. scale: [rows, columns / 32] float32, of 8-bit floats only.
    None if the rows fill no tiles, or a number is not finite.
    """
    rows, columns = values.shape
    in_range = scale is None or bool((scale * POWER).isfinite().all())
    if rows % TILE_ROWS or columns % GROUP or not in_range or not _is_finite(values):
        return None
    shape = rows // TILE_ROWS, TILE_ROWS, columns // GROUP, GROUP
    tiles = values.view(shape).permute(0, 2, 3, 1).flatten(2)
    if scale is None:
        return tiles.contiguous()
    scales = (scale * POWER).view(shape[:3]).transpose(1, 2).contiguous()
    return torch.cat([tiles.view(torch.uint8), scales.view(torch.uint8)], 2).view(values.dtype)


def _is_finite(values: Tensor) -> bool:
    if values.dtype is torch.float8_e4m3fn:
        return not bool(((values.view(torch.uint8) & NAN) == NAN).any())
    return bool(values.isfinite().all())


def rows_of(tiles: Tensor, rows: Tensor) -> Tensor:
    """As `diptych_kernels.packed_product.rows_of`."""
    if tiles.dtype in FLOATS:
        return _float_rows(tiles, rows)
    num_tiles, groups, num_bytes = tiles.shape
    bits = (num_bytes - FACTOR_BYTES) * 8 // (TILE_ROWS * GROUP)
    tile, row = rows // TILE_ROWS, rows % TILE_ROWS
    # After the quads of levels, two rows of factors in float16 are as long as one of quads.
    quads = tiles.view(torch.int32).view(num_tiles, groups, -1, TILE_ROWS)
    halves = tiles.view(torch.float16).view(num_tiles, groups, -1, TILE_ROWS)
    levels = levels_of(quads[tile, :, :-1, row].view(torch.uint8), bits)
    factors = halves[tile, :, -2:, row].float()
    return (levels * factors[..., :1] + factors[..., 1:]).view(len(rows), -1)


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
    x: Tensor, tiles: Tensor, out: Tensor, *, num_decodes: int, add: bool = False
) -> None:
    """As `diptych_kernels.packed_product.packed_product` with a matrix unit."""
    matrix = values_of(tiles).t()
    if tiles.dtype in FLOATS:
        product = x.mm(matrix)
        out.copy_(out + product if add else product)
        return
    decodes = rounded(x[:num_decodes]).mm(matrix)
    chunks = x[num_decodes:].bfloat16().float().mm(cut_off(matrix))
    product = torch.cat([decodes, chunks])
    out.copy_(out + product if add else product)


def cut_off(matrix: Tensor) -> Tensor:
    """Truncate float32 to bfloat16, after adding what truncation takes on average."""
    return ((matrix * LARGER).view(torch.int32) & -0x10000).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """Round [rows, columns] to 16 bits per value, with one scale for 32 of them."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / LEVELS
    levels = (groups / scale.clamp(min=SMALLEST)).round()
    return (levels * scale).view(x.shape)
