"""Matrices that stay as small in memory as in their file, for products on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych_engine.models.groups import Floats, Groups
from diptych_engine.models.rounding import like_tiles
from diptych_kernels.native.tile_layout import SPANS, WORD_BITS
from diptych_kernels.packed_product import (
    TILE_ROWS,
    gpu_tiles,
    is_available,
    kind_for,
    kind_of,
    packed_product,
    rows_of,
    to_float_tiles,
    to_tiles,
    unpack_rows,
    values_of,
)
from diptych_kernels.packed_product.gpu_tiles import FLOAT8, to_gpu_float_tiles, to_gpu_tiles

Part = Groups | Floats
"""What a matrix can be made of without loss."""


@dataclass(slots=True, frozen=True, eq=False)
class PackedMatrix:
    """Computes `x @ matrix^T` for a matrix [out, in] on a CPU."""

    tiles: Tensor
    """[out / 16, in / 32, bytes] uint8: levels and factors of the file's groups; or floats, as
    `to_float_tiles` makes them."""

    @classmethod
    def of(cls, parts: Sequence[Part]) -> PackedMatrix | None:
        """Return matrices one below the other as one; None if no tiles hold them, or the kernel
        cannot compute with them."""
        groups, floats = _by_kind(parts)
        if groups and floats:
            return None
        tiles = _of_floats(floats) if floats else _of_groups(groups)
        return None if tiles is None else cls(tiles)

    @property
    def rounds(self) -> bool:
        """Whether products round the other factor."""
        return self.tiles.dtype is torch.uint8

    @property
    def num_rows(self) -> int:
        return self.tiles.shape[0] * TILE_ROWS

    def with_rows(self, start: int, values: Tensor) -> PackedMatrix | None:
        """The same with other rows [n, in] from one on, which are rounded to such tiles as these
        are. None if they divide tiles, or those cannot hold them."""
        part = like_tiles(values, kind_of(self.tiles) if self.rounds else self.tiles.dtype)
        new = None if part is None else PackedMatrix.of([part])
        first, last = (row // TILE_ROWS for row in (start, start + len(values)))
        if new is None or start % TILE_ROWS:
            return None
        return PackedMatrix(torch.cat([self.tiles[:first], new.tiles, self.tiles[last:]]))

    def values(self) -> Tensor:
        """Return [out, in] floats."""
        return values_of(self.tiles)

    def rows(self, numbers: Tensor) -> Tensor:
        """[n] int64 -> [n, in] floats."""
        return rows_of(self.tiles, numbers)

    def product(self, x: Tensor, num_decodes: int, input_bits: int = WORD_BITS) -> Tensor:
        """[rows, in] -> [rows, out] of x's type."""
        out = x.new_empty(x.shape[0], self.num_rows)
        packed_product(x, self.tiles, out, num_decodes=num_decodes, input_bits=input_bits)
        return out

    def add_product_(
        self, sums: Tensor, x: Tensor, num_decodes: int, input_bits: int = WORD_BITS
    ) -> None:
        """sums [rows, out] += x @ matrix^T."""
        packed_product(
            x, self.tiles, sums, num_decodes=num_decodes, add=True, input_bits=input_bits
        )


@dataclass(slots=True, frozen=True, eq=False)
class GpuMatrix(PackedMatrix):
    """The same on a GPU; its tiles are those of `gpu_tiles`."""

    weight: Tensor
    """[in, out]: the plain matrix, without memory."""

    @classmethod
    def beside(cls, weight: Tensor, parts: Sequence[Part]) -> GpuMatrix | None:
        """Do the same as `of`, where the plain weight is. Floats of 16 bits gain nothing there."""
        groups, floats = _by_kind(parts)
        if groups and floats:
            return None
        device = weight.device
        if floats:
            scales = [part.scale.to(device) for part in floats if part.scale is not None]
            if len(scales) < len(parts):
                return None
            numbers = torch.cat([part.numbers.view(torch.uint8).to(device) for part in floats])
            tiles = to_gpu_float_tiles(numbers.view(FLOAT8), torch.cat(scales))
            return None if tiles is None else cls(tiles, weight)
        kind = kind_for(max(part.bits for part in groups), min(part.span for part in groups))
        if kind is None:
            return None

        def of_spans(factor: Tensor, span: int) -> Tensor:
            return factor.to(device).repeat_interleave(span // SPANS[kind], 1)

        levels = torch.cat([part.levels.to(device) for part in groups])
        scale = torch.cat([of_spans(part.scale, part.span) for part in groups])
        offset = torch.cat([of_spans(part.offset, part.span) for part in groups])
        tiles = to_gpu_tiles(levels, scale, offset, kind)
        return None if tiles is None else cls(tiles, weight)

    @property
    def num_rows(self) -> int:
        return self.tiles.shape[1]

    def with_rows(self, start: int, values: Tensor) -> GpuMatrix | None:
        kind = gpu_tiles.bits_of(self.tiles) if self.rounds else self.tiles.dtype
        part = like_tiles(values.to(self.tiles.device), kind)
        new = None if part is None else GpuMatrix.beside(self.weight, [part])
        if new is None:
            return None
        return GpuMatrix(gpu_tiles.with_rows(self.tiles, start, new.tiles), self.weight)

    def values(self) -> Tensor:
        out = self.weight.new_empty(self.weight.shape[::-1])
        unpack_rows(self.tiles, out)
        return out

    def rows(self, numbers: Tensor) -> Tensor:
        out = self.weight.new_empty(len(numbers), self.weight.shape[0])
        unpack_rows(self.tiles, out, numbers)
        return out


def packed_beside(weight: Tensor, parts: Sequence[Part]) -> PackedMatrix | None:
    """Return the matrix for products on the device of a plain weight [in, out]."""
    if weight.device.type == "cpu":
        return PackedMatrix.of(parts)
    return GpuMatrix.beside(weight, parts)


def _by_kind(parts: Sequence[Part]) -> tuple[list[Groups], list[Floats]]:
    groups = [part for part in parts if isinstance(part, Groups)]
    return groups, [part for part in parts if isinstance(part, Floats)]


def _of_groups(parts: Sequence[Groups]) -> Tensor | None:
    """The smallest tiles that hold all of them."""
    span = min(part.span for part in parts)
    kind = kind_for(max(part.bits for part in parts), span)
    if kind is None or not is_available():
        return None
    tiles = [to_tiles(part.levels, part.scale, part.offset, kind) for part in parts]
    own = [each for each in tiles if each is not None]
    return _one_below_the_other(own) if len(own) == len(parts) else None


def _of_floats(parts: Sequence[Floats]) -> Tensor | None:
    dtypes = {part.numbers.dtype for part in parts}
    if len(dtypes) > 1 or not is_available(*dtypes):
        return None
    scales = [part.scale for part in parts if part.scale is not None]
    numbers = _one_below_the_other([part.numbers for part in parts])
    return to_float_tiles(numbers, _one_below_the_other(scales) if scales else None)


def _one_below_the_other(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
