"""The packed product: rounds its input, then computes 16 or 32 columns at a time for all rows.

Decodes are summed up in integers. Chunks of prompts, which are bound by arithmetic, are computed in
bfloat16 by the processor's matrix unit, if it has one: it is four times as fast.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.arguments import AmxProduct, PackedProduct, PackedRows, places_of
from diptych_kernels.native.kernel import Call, Kernel, kernel_of
from diptych_kernels.native.tile_layout import (
    BYTE,
    E4M3,
    FLOAT_KINDS,
    GROUP,
    LEVEL_BITS,
    SPANS,
    TILE_ROWS,
    WORD_BITS,
)
from diptych_kernels.packed_product import reference
from diptych_kernels.packed_product.reference import FLOATS, kind_of, to_float_tiles, to_tiles
from diptych_kernels.trust import KnownCase, Results, is_trusted, random_values, unwritten

FLOAT, BFLOAT, WORD = 4, 2, 2
"""Sizes in bytes."""
ROWS, DECODE_TILES = places_of(PackedProduct, "rows", "tiles")
FIRST, END, CHUNK_TILES = places_of(AmxProduct, "first", "end", "tiles")
"""The positions of the arguments of a decode call, and of a chunk call, in a table's row."""
CONFIGURATION_BYTES = 64
"""Size, in bytes, of the matrix unit's configuration."""
INPUT_FACTORS = 4
"""Numbers beside the levels of a group of inputs."""
CASE_ROWS = 64 + 4 + 2 + 1
"""Rows of known cases, for blocks of every size."""


def workspace_bytes(rows: int, columns: int) -> int:
    """Return the size, in bytes, of a workspace for either call."""
    integers = rows * columns * WORD + rows * (columns // GROUP) * INPUT_FACTORS * FLOAT
    unpacked = torch.get_num_threads() * (CONFIGURATION_BYTES + 4 * TILE_ROWS * columns * BFLOAT)
    return max(integers, _rounded_bytes(rows, columns) + unpacked)


def decode_call(
    x: Tensor,
    tiles: Tensor,
    out: Tensor,
    workspace: Tensor,
    *,
    add: bool,
    input_bits: int = WORD_BITS,
) -> Call:
    """Return the call that computes all rows in integers, or with tiles of floats in float32;
    workspace: [>= workspace_bytes] int8."""
    rows, columns = x.shape
    num_tiles, groups, _ = tiles.shape
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
    return decode_kernel(kind_of(tiles), input_bits), arguments


def chunk_call(
    x: Tensor, first: int, tiles: Tensor, out: Tensor, workspace: Tensor, *, add: bool
) -> Call:
    """Return the call that computes the rows from `first` on with the matrix unit; workspace: as
    for `decode_call`."""
    rows, columns = x.shape
    num_tiles, groups, _ = tiles.shape
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
    return kernel_of("amx_product", kind_of(tiles)), arguments


def rows_call(tiles: Tensor, rows: Tensor, out: Tensor) -> Call:
    """Return the call that unpacks rows [n] int64 to `out` [n, columns]; both are contiguous."""
    num_tiles, groups, _ = tiles.shape
    arguments = PackedRows(
        rows.data_ptr(), len(rows), groups, tiles.data_ptr(), num_tiles, out.data_ptr()
    )
    return rows_kernel(kind_of(tiles)), arguments


def _rounded_bytes(rows: int, columns: int) -> int:
    """Size, in bytes, of inputs rounded to bfloat16, in blocks of 16 rows."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * columns * BFLOAT


@remembered
def decode_kernel(kind: int, input_bits: int = WORD_BITS) -> Kernel:
    """Return the kernel of decode calls for tiles of this kind; it is loaded at first use."""
    if kind in FLOAT_KINDS:
        return kernel_of("float_product", kind)
    return kernel_of("packed_product" if input_bits == WORD_BITS else "byte_product", kind)


@remembered
def rows_kernel(kind: int) -> Kernel:
    """Return the kernel of `rows_of`; otherwise as `decode_kernel`."""
    return kernel_of("float_rows" if kind in FLOAT_KINDS else "packed_rows", kind)


@remembered
def is_available() -> bool:
    """Whether the level in use has packed matrices, and all of their kernels are trusted."""
    return all(
        is_trusted(case, bits) for case in (PACKED_PRODUCT, PACKED_ROWS) for bits in LEVEL_BITS
    )


@remembered
def rounds_to_bytes() -> bool:
    """Whether the level in use has products of inputs that are rounded to 8 bits."""
    return all(is_trusted(BYTE_PRODUCT, bits) for bits in LEVEL_BITS)


@remembered
def has_floats(kind: int) -> bool:
    """Whether the level in use has tiles of floats of this kind, and trusts their kernels."""
    return all(is_trusted(case, kind) for case in (FLOAT_PRODUCT, FLOAT_ROWS))


@remembered
def has_matrix_unit() -> bool:
    """Whether chunks of prompts are computed by the matrix unit."""
    return all(is_trusted(AMX_PRODUCT, bits) for bits in LEVEL_BITS)


def integer_rows(num_decodes: int, rows: int) -> int:
    """Return how many of `rows` rows, of which `num_decodes` are decodes, are summed up in
    integers."""
    return num_decodes if has_matrix_unit() else rows


def rows_of(tiles: Tensor, rows: Tensor) -> Tensor:
    """As `diptych_kernels.packed_product.rows_of`."""
    rows, out = rows.contiguous(), torch.empty(len(rows), tiles.shape[1] * GROUP)
    own, arguments = rows_call(tiles, rows, out)
    own.run(arguments, 1)  # a row takes a microsecond
    return out


def packed_product(
    x: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    num_decodes: int,
    add: bool = False,
    input_bits: int = WORD_BITS,
) -> None:
    """As `diptych_kernels.packed_product.packed_product`."""
    rows, columns = x.shape
    workspace = torch.empty(workspace_bytes(rows, columns), dtype=torch.int8)
    in_integers = rows if tiles.dtype in FLOATS else integer_rows(num_decodes, rows)
    if in_integers:
        own, numbers = decode_call(
            x[:in_integers], tiles, out, workspace, add=add, input_bits=input_bits
        )
        own.run(numbers, torch.get_num_threads())
    if in_integers < rows:
        own, numbers = chunk_call(x, in_integers, tiles, out, workspace, add=add)
        own.run(numbers, torch.get_num_threads())


def _factors(bits: int) -> tuple[Tensor, Tensor]:
    """Rows, and the tiles that they are multiplied with."""
    groups, columns = 3, 48
    generator = torch.Generator().manual_seed(bits)
    levels = torch.randint(0, 1 << bits, (columns, groups * GROUP), generator=generator)
    scale, offset = random_values(2, columns, groups * GROUP // SPANS[bits])
    tiles = to_tiles(levels.to(torch.uint8), scale, offset, bits)
    assert tiles is not None
    return random_values(CASE_ROWS, groups * GROUP), tiles


def _float_factors(kind: int) -> tuple[Tensor, Tensor]:
    """The same with tiles of floats, among them 8-bit ones without a leading one."""
    dtype = next(own for own, number in FLOATS.items() if number == kind)
    values = random_values(48, 3 * GROUP).mul_(torch.logspace(-3, 1, 3 * GROUP)).to(dtype)
    tiles = to_float_tiles(values, random_values(1, 48, 3)[0] if kind == E4M3 else None)
    assert tiles is not None
    return random_values(CASE_ROWS, 3 * GROUP), tiles


def _rows(kernel: Kernel) -> Results:
    _, tiles = _inputs(kernel)
    rows, out = torch.arange(47, -1, -5), unwritten(10, tiles.shape[1] * GROUP)
    _, arguments = rows_call(tiles, rows, out)
    kernel.run(arguments, 1)
    return out, reference.rows_of(tiles, rows)


def _inputs(kernel: Kernel) -> tuple[Tensor, Tensor]:
    is_float = kernel.number in FLOAT_KINDS
    return _float_factors(kernel.number) if is_float else _factors(kernel.number)


def _product(kernel: Kernel, input_bits: int = WORD_BITS) -> Results:
    x, tiles = _inputs(kernel)
    workspace = torch.empty(workspace_bytes(*x.shape), dtype=torch.int8)
    actual, expected = unwritten(2, len(x), 48)
    _, arguments = decode_call(x, tiles, actual, workspace, add=False)
    kernel.run(arguments, 1)
    reference.packed_product(x, tiles, expected, num_decodes=len(x), input_bits=input_bits)
    return actual, expected


def _product_in_tiles(kernel: Kernel) -> Results:
    x, tiles = _factors(kernel.number)
    x = x[: TILE_ROWS + 3]
    workspace = torch.empty(workspace_bytes(*x.shape), dtype=torch.int8)
    actual, expected = unwritten(2, len(x), 48)
    _, arguments = chunk_call(x, 0, tiles, actual, workspace, add=False)
    kernel.run(arguments, 1)
    reference.packed_product(x, tiles, expected, num_decodes=0)
    return actual, expected


PACKED_PRODUCT = KnownCase("packed_product", _product, tolerance=1e-4)
BYTE_PRODUCT = KnownCase("byte_product", partial(_product, input_bits=BYTE), tolerance=1e-4)
PACKED_ROWS = KnownCase("packed_rows", _rows, tolerance=0.0)
AMX_PRODUCT = KnownCase("amx_product", _product_in_tiles, tolerance=1e-4)
FLOAT_PRODUCT = KnownCase("float_product", _product, tolerance=1e-5)
FLOAT_ROWS = KnownCase("float_rows", _rows, tolerance=0.0)
