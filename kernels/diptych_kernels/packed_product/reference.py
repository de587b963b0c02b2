"""The packed product in torch's operators."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from diptych_kernels.native.tile_layout import GROUP
from diptych_kernels.packed_product.tiles import values_of

LEVELS: Final = 32767
"""Levels on either side of zero."""
LARGER: Final = 1 + math.log(2) / 256
"""Compensates for truncation, as `native.unpacked_tile` does."""
SMALLEST: Final = torch.finfo(torch.float32).tiny


def packed_product(
    x: Tensor, tiles: Tensor, out: Tensor, *, num_decodes: int, add: bool = False
) -> None:
    """As `diptych_kernels.packed_product.packed_product` with a matrix unit."""
    matrix = values_of(tiles).t()
    decodes = rounded(x[:num_decodes]).mm(matrix)
    chunks = x[num_decodes:].bfloat16().float().mm(cut_off(matrix))
    product = torch.cat([decodes, chunks])
    out.copy_(out + product if add else product)


def cut_off(matrix: Tensor) -> Tensor:
    """Truncate float32 to bfloat16, after adding what truncation takes on average."""
    return ((matrix * LARGER).view(torch.int32) & -0x10000).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """Round [rows, columns] to 16 bits per value, with one scale for 32 of them."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / LEVELS
    levels = (groups / scale.clamp(min=SMALLEST)).round()
    return (levels * scale).view(x.shape)
