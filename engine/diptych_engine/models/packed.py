"""Matrices that stay as small in memory as in their file, for products on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych_engine.models.floats import Floats
from diptych_engine.models.groups import Groups
from diptych_kernels.packed_product import (
    TILE_ROWS,
    is_available,
    kind_for,
    packed_product,
    rows_of,
    to_float_tiles,
    to_tiles,
    values_of,
)

Part = Groups | Floats
"""What a matrix can be made of without loss."""


@dataclass(slots=True, frozen=True, eq=False)
class PackedMatrix:
    """Computes `x @ matrix^T` for a matrix [out, in]."""

    tiles: Tensor
    """[out / 16, in / 32, bytes] uint8: levels and factors of the file's groups; or floats, as
    `to_float_tiles` makes them."""

    @classmethod
    def of(cls, parts: Sequence[Part]) -> PackedMatrix | None:
        """Return matrices one below the other as one; None if no tiles hold them, or the kernel
        cannot compute with them."""
        groups = [part for part in parts if isinstance(part, Groups)]
        floats = [part for part in parts if isinstance(part, Floats)]
        if groups and floats:
            return None
        tiles = _of_floats(floats) if floats else _of_groups(groups)
        return None if tiles is None else cls(tiles)

    @property
    def rounds(self) -> bool:
        """Whether products round the other factor."""
        return self.tiles.dtype is torch.uint8

    @property
    def is_usable(self) -> bool:
        """Whether this process trusts the kernels: another one may have packed it."""
        return is_available(None if self.rounds else self.tiles.dtype)

    def values(self) -> Tensor:
        """Return [out, in] float32."""
        return values_of(self.tiles)

    def rows(self, numbers: Tensor) -> Tensor:
        """[n] int64 -> [n, in] float32."""
        return rows_of(self.tiles, numbers)

    def product(self, x: Tensor, num_decodes: int) -> Tensor:
        """[rows, in] -> [rows, out] float32."""
        out = x.new_empty(x.shape[0], self.tiles.shape[0] * TILE_ROWS)
        packed_product(x, self.tiles, out, num_decodes=num_decodes)
        return out

    def add_product_(self, sums: Tensor, x: Tensor, num_decodes: int) -> None:
        """sums [rows, out] += x @ matrix^T."""
        packed_product(x, self.tiles, sums, num_decodes=num_decodes, add=True)


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
