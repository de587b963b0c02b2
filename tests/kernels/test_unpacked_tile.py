"""What the matrix unit multiplies with, on any processor: unpacking needs no such unit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from diptych_kernels.native.compiled.unpacked_tile import unpack_tile
from diptych_kernels.native.tile_layout import GROUP, LEVEL_BITS, SPANS
from diptych_kernels.packed_product.reference import cut_off, to_tiles, values_of

COLUMNS, GROUPS = 16, 64


@pytest.mark.parametrize("bits", LEVEL_BITS)
def test_unpacked_weights_are_those_of_the_file_in_bfloat16(bits: int) -> None:
    """A product of which every fortieth weight is the neighbour of the right one is put aside, on
    machines that have the unit; this is seen on others too."""
    generator = torch.Generator().manual_seed(bits)
    levels = torch.randint(0, 1 << bits, (COLUMNS, GROUPS * GROUP), generator=generator)
    scale, offset = torch.randn(2, COLUMNS, GROUPS * GROUP // SPANS[bits], generator=generator)
    tiles = to_tiles(levels.to(torch.uint8), scale, offset, bits)
    assert tiles is not None
    pairs = np.zeros((GROUPS, GROUP // 2, COLUMNS, 2), np.uint16)
    unpack = unpack_tile(bits)
    run = njit(lambda source, target: unpack(source, GROUPS, target))
    run(tiles.data_ptr(), pairs.ctypes.data)
    in_columns = pairs.transpose(2, 0, 1, 3).reshape(COLUMNS, GROUPS * GROUP)
    unpacked = torch.from_numpy((in_columns.astype(np.uint32) << 16).view(np.float32))
    differing = unpacked != cut_off(values_of(tiles))
    assert differing.float().mean() < 1e-3
