"""Rounds matrices: to levels, which `weight_packing` q8 and q4 do to weights that a file holds as
floats; or to tiles of a kind, which new weights in place of packed ones are."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from diptych_engine.models.groups import Floats, Groups
from diptych_kernels.native.tile_layout import GROUP, SPANS
from diptych_kernels.packed_product.gpu_tiles import FLOAT8

BITS: Final = {"q8": 8, "q4": 4}
"""The bits of a level for each `weight_packing` that rounds."""
ROWS: Final = 4096
"""Rows that are rounded at once: their copies in float32 do not fill the memory."""


def can_round(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix of whole groups."""
    return len(shape) == 2 and shape[1] % GROUP == 0


def rounded(values: Tensor, bits: int, span: int = GROUP) -> Groups | None:
    """[rows, columns] floats -> levels of so many bits, with factors for `span` columns; None if
    float16 cannot hold these.

    The levels of a group are evenly spaced from its smallest value to its largest, and 0 is
    between them. So rounding what was rounded changes nothing, unless a group's values are so close
    (0.004) that the distance of its levels is no normal float16.
    """
    if not can_round(tuple(values.shape)):
        return None
    blocks = [_rounded_rows(rows.float(), bits, span) for rows in torch.split(values, ROWS)]
    levels, scale, offset = (torch.cat(column) for column in zip(*blocks, strict=True))
    finite = scale.isfinite().all() and offset.isfinite().all()
    return Groups(levels, scale, offset, bits) if finite else None


def like_tiles(values: Tensor, kind: int | torch.dtype) -> Groups | Floats | None:
    """[rows, columns] floats -> what tiles hold whose levels have so many bits, or whose floats are
    of a type; None if they cannot hold the values."""
    if isinstance(kind, int):
        return rounded(values, kind, SPANS[kind])
    if kind is not FLOAT8:
        return Floats(values.to(kind))
    groups = values.float().reshape(len(values), -1, GROUP)
    scale = groups.abs().amax(2).div_(torch.finfo(FLOAT8).max)
    steps = scale.where(scale > 0, 1.0)[..., None]
    return Floats((groups / steps).reshape(values.shape).to(FLOAT8), scale)


def _rounded_rows(values: Tensor, bits: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
    top = (1 << bits) - 1
    groups = values.reshape(len(values), -1, span)
    offset = groups.amin(2).clamp_(max=0).half().float()
    scale = ((groups.amax(2).clamp_(min=0) - offset) / top).half().float()
    steps = scale.where(scale > 0, 1.0)[..., None]
    levels = ((groups - offset[..., None]) / steps).round_().clamp_(0, top).to(torch.uint8)
    return levels.view(values.shape), scale, offset
