"""The quantised matrices of a GGUF file: integer levels in groups of 32 with a scale each.

`_TYPES` says for each type what a group is in the file; a new type is a row there. Its levels may
have any width up to 8 bits: they are kept in the smallest width that tiles can hold.

Block layouts: ggml-common.h of ggml (`block_q4_0` to `block_q8_0`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from diptych_kernels.packed_product import levels_of

GROUP: Final = 32
"""Columns that share a scale."""
Blocks = NDArray[Any]
"""[rows, groups] records of a file."""
Levels = NDArray[np.uint8]
"""[rows, groups, bytes], as in `Groups.levels`."""


def _bytes(blocks: Blocks) -> Levels:
    """Levels as they are in the file. NumPy copies those of a group much faster as one value than
    as bytes one by one."""
    return np.array(blocks["levels"]).view(np.uint8).reshape(*blocks.shape, -1)


def _signed(blocks: Blocks) -> Levels:
    """Levels of -128 to 127, moved to 0 to 255."""
    return _bytes(blocks) ^ np.uint8(128)


def _with_fifth_bits(blocks: Blocks) -> Levels:
    """Levels of 5 bits, of which the file has the highest apart: bit c is that of column c."""
    low = _bytes(blocks)
    fifth = np.array(blocks["fifth"]).view(np.uint8).reshape(*blocks.shape, -1)
    high = np.unpackbits(fifth, axis=-1, bitorder="little") << 4
    levels: Levels = np.concatenate([low & 15, low >> 4], axis=-1) | high
    return levels


@dataclass(frozen=True, slots=True)
class _GroupType:
    block: np.dtype[Any]
    """What a group is in the file: `scale`, `offset` if it has one, and what `levels` reads."""
    zero: int | None
    """The level that stands for 0; None: the group has an offset."""
    levels: Callable[[Blocks], Levels] = _bytes


def _block(*fields: tuple[str, str]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_SCALE: Final = ("scale", "<f2")
_OFFSET: Final = ("offset", "<f2")
_FIFTH: Final = ("fifth", "V4")
_TYPES: Final[Mapping[GGMLQuantizationType, _GroupType]] = {
    GGMLQuantizationType.Q4_0: _GroupType(_block(_SCALE, ("levels", "V16")), 8),
    GGMLQuantizationType.Q4_1: _GroupType(_block(_SCALE, _OFFSET, ("levels", "V16")), None),
    GGMLQuantizationType.Q5_0: _GroupType(
        _block(_SCALE, _FIFTH, ("levels", "V16")), 16, _with_fifth_bits
    ),
    GGMLQuantizationType.Q5_1: _GroupType(
        _block(_SCALE, _OFFSET, _FIFTH, ("levels", "V16")), None, _with_fifth_bits
    ),
    GGMLQuantizationType.Q8_0: _GroupType(_block(_SCALE, ("levels", "V32")), 128, _signed),
}


@dataclass(slots=True, frozen=True)
class Groups:
    """A matrix whose value at (r, c) is `level[r, c] * scale[r, c // 32] + offset[r, c // 32]`."""

    levels: Tensor
    """[rows, groups, bytes] uint8. 32 bytes are a level each, 0 to 255; in 16 bytes, of levels 0
    to 15, the low halves are the levels of the first 16 columns, and the high halves the rest."""
    scale: Tensor
    """[rows, groups] float32."""
    offset: Tensor
    """[rows, groups] float32."""

    @property
    def bits(self) -> int:
        """The size of a level in memory: 4 or 8."""
        return self.levels.shape[-1] * 8 // GROUP

    def values(self) -> Tensor:
        """Return [rows, columns] float32, equal to those of the file: neither the product nor the
        sum of a level and two float16 is rounded."""
        values = levels_of(self.levels, self.bits).float()
        values.mul_(self.scale[..., None]).add_(self.offset[..., None])
        return values.view(len(values), -1)

    def columns(self, start: int, length: int) -> Groups | None:
        """Return some of the columns; None if that would divide a group."""
        if start % GROUP or length % GROUP:
            return None
        own = slice(start // GROUP, (start + length) // GROUP)
        return Groups(self.levels[:, own], self.scale[:, own], self.offset[:, own])

    def rows(self, order: Tensor) -> Groups:
        """Return the rows that `order` [n] int64 names."""
        return Groups(self.levels[order], self.scale[order], self.offset[order])


def read_groups(
    raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> Groups | None:
    """Read a tensor as the file stores it; None if it is no matrix of groups of 32.

    raw: [bytes] of the tensor. shape: (rows, columns) of its values.
    """
    group = _TYPES.get(kind)
    if group is None or len(shape) != 2:
        return None
    rows, columns = shape
    blocks = raw.view(group.block).reshape(rows, columns // GROUP)
    scale = _factor(blocks["scale"])
    offset = _factor(blocks["offset"]) if group.zero is None else scale * -group.zero
    return Groups(torch.from_numpy(group.levels(blocks)), scale, offset)


def has_groups(tensors: Iterable[tuple[GGMLQuantizationType, tuple[int, ...]]]) -> bool:
    """Whether any of a file's tensors, each of a type and a shape, is such a matrix."""
    return any(kind in _TYPES and len(shape) == 2 for kind, shape in tensors)


def _factor(stored: NDArray[Any]) -> Tensor:
    """[rows, groups] float16 -> float32."""
    return torch.from_numpy(stored.astype(np.float32))
