"""The test cases for the kernels for packed products."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.native.kernel import Kernel
from diptych_kernels.native.tile_layout import GROUP
from diptych_kernels.packed_product import reference
from diptych_kernels.packed_product.calls import chunk_call, decode_call, workspace_bytes
from diptych_kernels.packed_product.tiles import to_tiles
from diptych_kernels.trust import KnownCase, Results, random_values, unwritten


def _factors(bits: int) -> tuple[Tensor, Tensor]:
    """Rows, for blocks of every size, and the tiles that they are multiplied with."""
    groups, columns = 3, 48
    generator = torch.Generator().manual_seed(bits)
    size = GROUP * bits // 8
    levels = torch.randint(0, 256, (columns, groups, size), generator=generator)
    scale, offset = random_values(2, columns, groups)
    tiles = to_tiles(levels.to(torch.uint8), scale, offset)
    assert tiles is not None
    return random_values(19, groups * GROUP), tiles


def _product(kernel: Kernel) -> Results:
    x, tiles = _factors(kernel.number)
    workspace = torch.empty(workspace_bytes(*x.shape), dtype=torch.int8)
    actual, expected = unwritten(2, len(x), 48)
    _, arguments = decode_call(x, tiles, actual, workspace, add=False)
    kernel.run(arguments, 1)
    reference.packed_product(x, tiles, expected, num_decodes=len(x))
    return actual, expected


def _product_in_tiles(kernel: Kernel) -> Results:
    x, tiles = _factors(kernel.number)
    workspace = torch.empty(workspace_bytes(*x.shape), dtype=torch.int8)
    actual, expected = unwritten(2, len(x), 48)
    _, arguments = chunk_call(x, 0, tiles, actual, workspace, add=False)
    kernel.run(arguments, 1)
    reference.packed_product(x, tiles, expected, num_decodes=0)
    return actual, expected


PACKED_PRODUCT = KnownCase("packed_product", _product, tolerance=1e-4)
AMX_PRODUCT = KnownCase("amx_product", _product_in_tiles, tolerance=1e-4)
