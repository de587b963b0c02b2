"""Matrices that products read as they are stored: floats, and the quantised ones of a GGUF file,
integer levels with a scale and an offset for 16 or 32.

`_TYPES` says for each type what a block is in the file, and how its levels and factors are read; a
new type is a row there. K-quants have two stages of scales: integers of a few bits for 16 or 32
columns, and float16 for 256. Here they are multiplied out, exactly.

Block layouts: ggml-common.h of ggml (`block_q4_0` and its neighbours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import IQ4_NL, Q4_K
from numpy.typing import NDArray
from torch import Tensor

from diptych_kernels.native.tile_layout import GROUP

Blocks = NDArray[Any]
"""[blocks] records of a file."""
Levels = NDArray[Any]
"""[blocks, columns of a block] uint8."""
Factors = NDArray[np.float32]
"""[blocks, spans of a block]."""
Parts = tuple[Levels, Factors, Factors]
"""Levels, scales and offsets."""
LARGE: Final = 256
"""Columns of a K-quant's block."""
AT_ONCE: Final = 1 << 16
"""Blocks of which the parts are read at once: the memory for intermediate results is small."""


def _field(blocks: Blocks, name: str, *shape: int) -> NDArray[Any]:
    """[blocks, ...] of one field; numpy computes faster with a copy than with parts of records."""
    found: NDArray[Any] = np.ascontiguousarray(blocks[name]).reshape(len(blocks), *shape)
    return found


def _float(blocks: Blocks, name: str) -> Factors:
    """[blocks, 1] of a field in float16."""
    return _field(blocks, name, 1).astype(np.float32)


def _nibbles(blocks: Blocks, size: int) -> Levels:
    """Levels of 4 bits: of each `size` bytes first the low halves, then the high ones."""
    stored = _field(blocks, "levels", -1, 1, size)
    return np.concatenate([stored & 15, stored >> 4], axis=2).reshape(len(blocks), -1)


def _centred(levels: Levels, scale: Factors, zero: int) -> Parts:
    """With the level that stands for 0 in place of an offset."""
    return levels, scale, scale * np.float32(-zero)


def _fifth(blocks: Blocks) -> Levels:
    """The fifth bits of 32 levels."""
    bits = np.unpackbits(_field(blocks, "fifth", 4), axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: Blocks) -> Parts:
    return _centred(_nibbles(blocks, 16), _float(blocks, "scale"), 8)


def _q4_1(blocks: Blocks) -> Parts:
    return _nibbles(blocks, 16), _float(blocks, "scale"), _float(blocks, "offset")


def _q5_0(blocks: Blocks) -> Parts:
    return _centred(_nibbles(blocks, 16) | _fifth(blocks), _float(blocks, "scale"), 16)


def _q5_1(blocks: Blocks) -> Parts:
    levels, scale, offset = _q4_1(blocks)
    return np.bitwise_or(levels, _fifth(blocks)), scale, offset


def _q8_0(blocks: Blocks) -> Parts:
    signed = _field(blocks, "levels", GROUP)
    return _centred(signed ^ np.uint8(128), _float(blocks, "scale"), 128)


def _q4_k(blocks: Blocks) -> Parts:
    scales, minima = Q4_K.get_scale_min(_field(blocks, "factors", 12))
    scale, offset = _float(blocks, "scale") * scales, -_float(blocks, "minimum") * minima
    return _nibbles(blocks, GROUP), scale, offset


def _q5_k(blocks: Blocks) -> Parts:
    levels, scale, offset = _q4_k(blocks)
    fifth = _field(blocks, "fifth", 1, GROUP) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return levels | (fifth << 4).reshape(levels.shape), scale, offset


def _q6_k(blocks: Blocks) -> Parts:
    tops = _field(blocks, "tops", 2, 1, GROUP) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    levels = _nibbles(blocks, 64) | (tops << 4).reshape(-1, LARGE)
    return _centred(levels, _float(blocks, "scale") * _field(blocks, "factors", 16), 32)


_CURVE: Final = np.array(IQ4_NL.kvalues, np.int16)
_ZERO: Final = 128
_RAISED: Final = (_CURVE + _ZERO).astype(np.uint8)
"""The values that the levels of IQ4 stand for, as levels of 8 bits."""


def _iq4_nl(blocks: Blocks) -> Parts:
    return _centred(_RAISED[_nibbles(blocks, 16)], _float(blocks, "scale"), _ZERO)


def _iq4_xs(blocks: Blocks) -> Parts:
    low = _nibbles_apart(_field(blocks, "low", 4))
    high = _field(blocks, "high", 1) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(np.float32) - 32
    return _centred(_RAISED[_nibbles(blocks, 16)], _float(blocks, "scale") * scales, _ZERO)


def _nibbles_apart(stored: Levels) -> Levels:
    """[blocks, bytes] -> [blocks, 2 bytes]: the halves of each byte beside each other."""
    return np.stack([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1)


@dataclass(frozen=True, slots=True)
class _Type:
    bits: int
    """The size of a level; up to this the tiles must hold them."""
    block: np.dtype[Any]
    columns: int
    """How many of them a block has."""
    parts: Callable[[Blocks], Parts]


def _block(**fields: str) -> np.dtype[Any]:
    return np.dtype(list(fields.items()))


_TYPES: Final[Mapping[GGMLQuantizationType, _Type]] = {
    GGMLQuantizationType.Q4_0: _Type(4, _block(scale="<f2", levels="16u1"), GROUP, _q4_0),
    GGMLQuantizationType.Q4_1: _Type(
        4, _block(scale="<f2", offset="<f2", levels="16u1"), GROUP, _q4_1
    ),
    GGMLQuantizationType.Q5_0: _Type(
        5, _block(scale="<f2", fifth="4u1", levels="16u1"), GROUP, _q5_0
    ),
    GGMLQuantizationType.Q5_1: _Type(
        5, _block(scale="<f2", offset="<f2", fifth="4u1", levels="16u1"), GROUP, _q5_1
    ),
    GGMLQuantizationType.Q8_0: _Type(8, _block(scale="<f2", levels="32u1"), GROUP, _q8_0),
    GGMLQuantizationType.Q4_K: _Type(
        4, _block(scale="<f2", minimum="<f2", factors="12u1", levels="128u1"), LARGE, _q4_k
    ),
    GGMLQuantizationType.Q5_K: _Type(
        5,
        _block(scale="<f2", minimum="<f2", factors="12u1", fifth="32u1", levels="128u1"),
        LARGE,
        _q5_k,
    ),
    GGMLQuantizationType.Q6_K: _Type(
        6, _block(levels="128u1", tops="64u1", factors="16i1", scale="<f2"), LARGE, _q6_k
    ),
    GGMLQuantizationType.IQ4_NL: _Type(8, _block(scale="<f2", levels="16u1"), GROUP, _iq4_nl),
    GGMLQuantizationType.IQ4_XS: _Type(
        8, _block(scale="<f2", high="<u2", low="4u1", levels="128u1"), LARGE, _iq4_xs
    ),
}


@dataclass(slots=True, frozen=True)
class Groups:
    """A matrix of the values `level * scale + offset`."""

    levels: Tensor
    """[rows, columns] uint8, of at most `bits` bits."""
    scale: Tensor
    """[rows, columns / span] float32."""
    offset: Tensor
    """[rows, columns / span] float32."""
    bits: int

    @property
    def span(self) -> int:
        """How many columns share a scale and an offset."""
        return self.levels.shape[1] // self.scale.shape[1]

    def values(self) -> Tensor:
        """Return [rows, columns] float32."""
        values = self.levels.view(*self.scale.shape, self.span).float()
        values.mul_(self.scale[..., None]).add_(self.offset[..., None])
        return values.view(self.levels.shape)

    def columns(self, start: int, length: int) -> Groups | None:
        """Return some of the columns; None if that would divide a group of a tile."""
        if start % GROUP or length % GROUP:
            return None
        first, last = start // self.span, (start + length) // self.span
        scale, offset = self.scale[:, first:last], self.offset[:, first:last]
        return Groups(self.levels[:, start : start + length], scale, offset, self.bits)

    def rows(self, order: Tensor) -> Groups:
        """Return the rows that `order` [n] int64 names."""
        return Groups(self.levels[order], self.scale[order], self.offset[order], self.bits)


def read_groups(
    raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> Groups | None:
    """Read a tensor as the file stores it; None if it is no matrix of such levels.

    raw: [bytes] of the tensor. shape: (rows, columns) of its values.
    """
    own = _TYPES.get(kind)
    if own is None or len(shape) != 2:
        return None
    blocks = raw.view(own.block)
    levels = torch.empty(len(blocks), own.columns, dtype=torch.uint8)
    factors: list[Tensor] = []
    for first in range(0, len(blocks), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        found, *both = map(torch.from_numpy, own.parts(blocks[some]))
        factors = factors or [torch.empty(len(blocks), both[0].shape[1]) for _ in both]
        levels[some] = found
        for factor, part in zip(factors, both, strict=True):
            factor[some] = part
    scale, offset = (factor.view(shape[0], -1) for factor in factors)
    return Groups(levels.view(shape), scale, offset, own.bits)


def has_groups(tensors: Iterable[tuple[GGMLQuantizationType, tuple[int, ...]]]) -> bool:
    """Whether any of a file's tensors, each of a type and a shape, is such a matrix."""
    return any(kind in _TYPES and len(shape) == 2 for kind, shape in tensors)


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
