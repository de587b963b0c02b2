"""Matrices that stay as small in memory as in their file, for products on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych_engine.models.groups import Groups
from diptych_kernels.packed_product import (
    TILE_ROWS,
    is_available,
    kind_for,
    packed_product,
    rows_of,
    to_tiles,
    values_of,
)


@dataclass(slots=True, frozen=True, eq=False)
class PackedMatrix:
    """Computes `x @ matrix^T` for a matrix [out, in]."""

    tiles: Tensor
    """[out / 16, in / 32, bytes] uint8: levels and factors of the file's groups."""

    @classmethod
    def of(cls, parts: Sequence[Groups]) -> PackedMatrix | None:
        """Return matrices one below the other as one, in the smallest tiles that hold all of them;
        None if there are none, or the kernel cannot compute with them."""
        span = min(part.span for part in parts)
        kind = kind_for(max(part.bits for part in parts), span)
        if kind is None or not is_available():
            return None
        factors = [(part.levels, *part.factors(span)) for part in parts]
        levels, scale, offset = (torch.cat(column) for column in zip(*factors, strict=True))
        tiles = to_tiles(levels, scale, offset, kind)
        return None if tiles is None else cls(tiles)

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
