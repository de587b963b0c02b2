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
HALF: Final = 2
"""Bytes of a float16."""


@dataclass(slots=True, frozen=True)
class Groups:
    """A matrix whose value at (r, c) is `levels[r, c] * scale[r, c // 32] + offset[r, c // 32]`."""

    levels: Tensor
    """[rows, columns]: uint8 of 0 to 15 if `bits` is 4, int8 if it is 8."""
    scale: Tensor
    """[rows, groups] float32."""
    offset: Tensor | None
    """[rows, groups] float32; None: zeros."""
    bits: int

    def values(self) -> Tensor:
        """[rows, columns] float32."""
        rows, columns = self.levels.shape
        values = self.levels.float().view(rows, -1, GROUP).mul_(self.scale[..., None])
        if self.offset is not None:
            values.add_(self.offset[..., None])
        return values.view(rows, columns)

    def columns(self, start: int, length: int) -> Groups | None:
        """Some of the columns; None if that would cut a group in two."""
        if start % GROUP or length % GROUP:
            return None
        own = slice(start // GROUP, (start + length) // GROUP)
        offset = None if self.offset is None else self.offset[:, own]
        levels = self.levels[:, start : start + length]
        return Groups(levels, self.scale[:, own], offset, self.bits)

    def rows(self, order: Tensor) -> Groups:
        """The rows that `order` [n] int64 names."""
        offset = None if self.offset is None else self.offset[order]
        return Groups(self.levels[order], self.scale[order], offset, self.bits)


def read_groups(
    raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> Groups | None:
    """A tensor as the file holds it; None if it is no matrix of 4- or 8-bit groups of 32.

    raw: [bytes] of the tensor. shape: (rows, columns) of its values.
    """
    if kind not in _READERS or len(shape) != 2:
        return None
    rows, columns = shape
    return _READERS[kind](raw.reshape(rows, columns // GROUP, -1))


def has_groups(tensors: Iterable[tuple[GGMLQuantizationType, tuple[int, ...]]]) -> bool:
    """Whether any of a file's tensors, each of a type and a shape, is such a matrix."""
    return any(kind in _READERS and len(shape) == 2 for kind, shape in tensors)


def _read_q4_0(blocks: NDArray[np.uint8]) -> Groups:
    scale = _halves(blocks, 0)
    return Groups(_nibbles(blocks[..., HALF:]), scale, scale * -8, bits=4)


def _read_q4_1(blocks: NDArray[np.uint8]) -> Groups:
    return Groups(_nibbles(blocks[..., 2 * HALF :]), _halves(blocks, 0), _halves(blocks, 1), bits=4)


def _read_q8_0(blocks: NDArray[np.uint8]) -> Groups:
    levels = np.array(blocks[..., HALF:]).view(np.int8).reshape(len(blocks), -1)
    return Groups(torch.from_numpy(levels), _halves(blocks, 0), None, bits=8)


def _halves(blocks: NDArray[np.uint8], index: int) -> Tensor:
    """The float16 at a place in every block: [rows, groups] float32."""
    own: NDArray[Any] = blocks[..., index * HALF : (index + 1) * HALF]
    return torch.from_numpy(np.ascontiguousarray(own).view(np.float16)[..., 0].astype(np.float32))


def _nibbles(packed: NDArray[np.uint8]) -> Tensor:
    """[rows, groups, 16] -> [rows, columns]: the low halves of a group's bytes come first."""
    rows, groups, _ = packed.shape
    levels = np.empty((rows, groups, 2, GROUP // 2), np.uint8)
    np.bitwise_and(packed, 15, out=levels[:, :, 0])
    np.right_shift(packed, 4, out=levels[:, :, 1])
    return torch.from_numpy(levels.reshape(rows, -1))


_READERS: Final = {
    GGMLQuantizationType.Q4_0: _read_q4_0,
    GGMLQuantizationType.Q4_1: _read_q4_1,
    GGMLQuantizationType.Q8_0: _read_q8_0,
}
