"""The calls of the kernels for packed products, and their working memory."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.arguments import AmxProduct, PackedProduct, places_of
from diptych_kernels.native.kernel import Call, Kernel, kernel_of
from diptych_kernels.native.tile_layout import GROUP, LEVEL_BITS, TILE_ROWS, group_bytes

FLOAT, BFLOAT, WORD = 4, 2, 2
"""Sizes in bytes."""
ROWS, DECODE_TILES = places_of(PackedProduct, "rows", "tiles")
FIRST, END, CHUNK_TILES = places_of(AmxProduct, "first", "end", "tiles")
"""The positions of the arguments of a decode call, and of a chunk call, in a table's row."""
CONFIGURATION_BYTES = 64
"""Size, in bytes, of the matrix unit's configuration."""
BITS_OF = {group_bytes(bits): bits for bits in LEVEL_BITS}


def workspace_bytes(rows: int, columns: int) -> int:
    """Return the size, in bytes, of a workspace for either call."""
    integers = rows * columns * WORD + rows * (columns // GROUP) * 2 * FLOAT
    unpacked = torch.get_num_threads() * (CONFIGURATION_BYTES + 4 * TILE_ROWS * columns * BFLOAT)
    return max(integers, _rounded_bytes(rows, columns) + unpacked)


def decode_call(x: Tensor, tiles: Tensor, out: Tensor, workspace: Tensor, *, add: bool) -> Call:
    """Return the call that computes all rows in integers; workspace: [>= workspace_bytes] int8."""
    rows, columns = x.shape
    num_tiles, groups, num_bytes = tiles.shape
    arguments = PackedProduct(
        x=x.data_ptr(),
        x_stride=x.stride(0) * FLOAT,
        rows=rows,
        groups=groups,
        tiles=tiles.data_ptr(),
        num_tiles=num_tiles,
        out=out.data_ptr(),
        out_stride=out.stride(0) * FLOAT,
        add=int(add),
        inputs=workspace.data_ptr(),
        factors=workspace.data_ptr() + rows * columns * WORD,
    )
    return decode_kernel(BITS_OF[num_bytes]), arguments


def chunk_call(
    x: Tensor, first: int, tiles: Tensor, out: Tensor, workspace: Tensor, *, add: bool
) -> Call:
    """Return the call that computes the rows from `first` on with the matrix unit; workspace: as
    for `decode_call`."""
    rows, columns = x.shape
    num_tiles, groups, num_bytes = tiles.shape
    arguments = AmxProduct(
        x=x.data_ptr(),
        x_stride=x.stride(0) * FLOAT,
        first=first,
        end=rows,
        groups=groups,
        tiles=tiles.data_ptr(),
        num_tiles=num_tiles,
        out=out.data_ptr(),
        out_stride=out.stride(0) * FLOAT,
        add=int(add),
        inputs=workspace.data_ptr(),
        memory=workspace.data_ptr() + _rounded_bytes(rows, columns),
    )
    return chunk_kernel(BITS_OF[num_bytes]), arguments


def _rounded_bytes(rows: int, columns: int) -> int:
    """Size, in bytes, of inputs rounded to bfloat16, in blocks of 16 rows."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * columns * BFLOAT


@remembered
def decode_kernel(bits: int) -> Kernel:
    """Return the kernel of decode calls for levels of this many bits; it is loaded at first use."""
    return kernel_of("packed_product", bits)


@remembered
def chunk_kernel(bits: int) -> Kernel:
    """Return the kernel of chunk calls; otherwise as `decode_kernel`."""
    return kernel_of("amx_product", bits)
