"""Matrices of floats of 16 or 8 bits, which products can read as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych_kernels.native.tile_layout import GROUP


@dataclass(slots=True, frozen=True)
class Floats:
    """A matrix of floats; those of 8 bits have a scale for 32 columns of a row."""

    numbers: Tensor
    """[rows, columns] bfloat16, float16 or float8_e4m3fn."""
    scale: Tensor | None = None
    """[rows, columns / 32] float32."""

    def values(self) -> Tensor:
        """Return [rows, columns] float32."""
        values = self.numbers.float()
        if self.scale is not None:
            values.view(*self.scale.shape, GROUP).mul_(self.scale[..., None])
        return values

    def columns(self, start: int, length: int) -> Floats | None:
        """Return some of the columns; None if that would divide a group."""
        if start % GROUP or length % GROUP:
            return None
        scale = None
        if self.scale is not None:
            scale = self.scale[:, start // GROUP : (start + length) // GROUP]
        return Floats(self.numbers[:, start : start + length], scale)

    def rows(self, order: Tensor) -> Floats:
        """Return the rows that `order` [n] int64 names."""
        return Floats(self.numbers[order], None if self.scale is None else self.scale[order])
