"""The quantised matrices of a GGUF file: integer levels in groups of 32 with a scale each.

Block layouts: ggml-common.h of ggml (`block_q4_0`, `block_q4_1`, `block_q8_0`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

GROUP: Final = 32
"""Columns that share a scale."""
_BLOCKS: Final = {
    GGMLQuantizationType.Q4_0: np.dtype([("scale", "<f2"), ("levels", "V16")]),
    GGMLQuantizationType.Q4_1: np.dtype([("scale", "<f2"), ("offset", "<f2"), ("levels", "V16")]),
    GGMLQuantizationType.Q8_0: np.dtype([("scale", "<f2"), ("levels", "V32")]),
}
"""What a group is in the file. NumPy copies a group's levels much faster as one value than as bytes
one by one."""


@dataclass(slots=True, frozen=True)
class Groups:
    """A matrix whose value at (r, c) is `level[r, c] * scale[r, c // 32] + offset[r, c // 32]`."""

    levels: Tensor
    """[rows, groups, bytes] uint8, as in the file: 32 bytes are levels of -128 to 127; in 16 bytes,
    the low halves are the levels, 0 to 15, of the first 16 columns, and the high halves the rest.
    """
    scale: Tensor
    """[rows, groups] float32."""
    offset: Tensor | None
    """[rows, groups] float32; None: zeros."""

    @property
    def bits(self) -> int:
        """The size of a level: 4 or 8."""
        return self.levels.shape[-1] * 8 // GROUP

    def values(self) -> Tensor:
        """Return [rows, columns] float32."""
        levels = self.levels
        if self.bits == 4:
            values = torch.cat([levels & 15, levels >> 4], 2).float()
        else:
            values = levels.view(torch.int8).float()
        values.mul_(self.scale[..., None])
        if self.offset is not None:
            values.add_(self.offset[..., None])
        return values.view(len(levels), -1)

    def columns(self, start: int, length: int) -> Groups | None:
        """Return some of the columns; None if that would divide a group."""
        if start % GROUP or length % GROUP:
            return None
        own = slice(start // GROUP, (start + length) // GROUP)
        offset = None if self.offset is None else self.offset[:, own]
        return Groups(self.levels[:, own], self.scale[:, own], offset)

    def rows(self, order: Tensor) -> Groups:
        """Return the rows that `order` [n] int64 names."""
        offset = None if self.offset is None else self.offset[order]
        return Groups(self.levels[order], self.scale[order], offset)


def read_groups(
    raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> Groups | None:
    """Read a tensor as the file stores it; None if it is no matrix of 4- or 8-bit groups of 32.

    raw: [bytes] of the tensor. shape: (rows, columns) of its values.
    """
    if kind not in _BLOCKS or len(shape) != 2:
        return None
    rows, columns = shape
    blocks = raw.view(_BLOCKS[kind]).reshape(rows, columns // GROUP)
    levels = np.array(blocks["levels"]).view(np.uint8).reshape(*blocks.shape, -1)
    scale, offset = _factor(blocks["scale"]), None
    if kind is GGMLQuantizationType.Q4_0:
        offset = scale * -8
    elif kind is GGMLQuantizationType.Q4_1:
        offset = _factor(blocks["offset"])
    return Groups(torch.from_numpy(levels), scale, offset)


def has_groups(tensors: Iterable[tuple[GGMLQuantizationType, tuple[int, ...]]]) -> bool:
    """Whether any of a file's tensors, each of a type and a shape, is such a matrix."""
    return any(kind in _BLOCKS and len(shape) == 2 for kind, shape in tensors)


def _factor(stored: NDArray[Any]) -> Tensor:
    """[rows, groups] float16 -> float32."""
    return torch.from_numpy(stored.astype(np.float32))
