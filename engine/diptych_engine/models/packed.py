"""Matrices that stay as small in memory as in their file, for products with a few rows on a CPU.

torch's int4 kernel computes `(level - 8) * scale + zero` for groups of 32 with bfloat16
activations, sums in float32, and rounds the result to bfloat16. It gives each row the same bits
whatever rows stand beside it. Levels of 8 bits are passed to it as two of 4: see `_scales`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych_engine.models.groups import GROUP, Groups

MIDDLE: Final = 8
"""The level that stands for zero in torch's kernel."""
ROW_UNIT: Final = 16
"""The kernel takes multiples of so many rows."""
ROWS_AT_ONCE: Final = 1024
"""Rows converted together: a multiple of the kernel's own blocks, which are of up to 64."""
PACKED_ROWS: Final = 64
"""Up to so many rows the packed product is faster than the plain one: docs/performance.md."""
INNER_K_TILES: Final = 1
"""An argument of the conversion that only GPUs look at."""


def packed_rows(num_generated: int, num_decodes: int) -> int:
    """How many of a step's tokens go through packed weights: those that were generated, or none.

    What a token was decides, not what stands beside it, so that it gets the same KV whenever and
    wherever it is computed: in another batch, again after a preemption, or in another engine. A
    batch of more decodes than `PACKED_ROWS` gives that up for speed.

    num_generated: tokens of the step behind their prompts. num_decodes: how many of those are
    computed for the first time.
    """
    return num_generated if num_decodes <= PACKED_ROWS else 0


@dataclass(slots=True, frozen=True)
class PackedMatrix:
    """Computes `x @ matrix^T` for a matrix [out, in]."""

    levels: Tensor
    """[out, in / 2] uint8, or [out, in] for levels of 8 bits; laid out for this processor."""
    scales: Tensor
    """[groups, out, 2] bfloat16: scale, and the value of level 8."""
    halves: int
    """2: levels of 8 bits, as two of 4."""

    @classmethod
    def of(cls, parts: Sequence[Groups]) -> PackedMatrix | None:
        """Put matrices below each other; None if the kernel cannot compute with that."""
        num_rows = sum(len(part.levels) for part in parts)
        [bits, *others] = {part.bits for part in parts}
        if others or num_rows % ROW_UNIT:
            return None
        scales = torch.cat([_scales(part) for part in parts], 1).to(torch.bfloat16)
        return cls(_converted([part.levels for part in parts]), scales, bits // 4)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.levels, self.scales

    def product(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] bfloat16."""
        x = x.to(torch.bfloat16)
        x = x.contiguous() if self.halves == 1 else torch.cat([x, x], 1)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.levels, GROUP, self.scales
        )
        return product


def _scales(part: Groups) -> Tensor:
    """The kernel's [groups, rows, 2] float32.

    Levels of 8 bits are q = 16 (high - 8) + low: twice the columns, once of high and once of low
    halves, give the same product with the input repeated.
    """
    scale = part.scale
    zero = scale * MIDDLE if part.offset is None else part.offset + scale * MIDDLE
    pairs = torch.stack([scale, zero], -1)
    if part.bits == 8:
        high = torch.stack([scale * 16, torch.zeros_like(scale)], -1)
        pairs = torch.cat([high, pairs], 1)
    return pairs.transpose(0, 1)


def _converted(parts: Sequence[Tensor]) -> Tensor:
    """Levels of matrices that lie below each other, [out, in] -> in the kernel's order.

    Piece by piece: the conversion reads four bytes a level.
    """
    wide = parts[0].dtype == torch.int8
    [num_columns] = {part.shape[1] for part in parts}
    num_bytes = num_columns if wide else num_columns // 2
    packed = parts[0].new_empty(sum(map(len, parts)), num_bytes, dtype=torch.uint8)
    levels = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    for first in range(0, len(levels), ROWS_AT_ONCE):
        piece = levels[first : first + ROWS_AT_ONCE].to(torch.int32)
        if wide:
            piece = torch.cat([(piece >> 4) + MIDDLE, piece & 15], 1)
        packed[first : first + ROWS_AT_ONCE] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            piece, INNER_K_TILES
        )
    return packed
