"""Products with matrices of floats of 16 and 8 bits: only the sums are rounded, to float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych_kernels.packed_product import packed_product, rows_of, to_float_tiles, values_of

pytestmark = pytest.mark.usefixtures("compiled_level")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=lambda dtype: str(dtype)[6:]
)


def random_matrix(dtype: torch.dtype, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Tiles, and the same in float32; of 8 bits every number there is, with scales of any size."""
    generator = torch.Generator().manual_seed(rows)
    if dtype is not torch.float8_e4m3fn:
        values = torch.randn(rows, columns, generator=generator).to(dtype)
        tiles, matrix = to_float_tiles(values), values.float()
    else:
        bits = torch.arange(rows * columns).to(torch.uint8)
        bits[bits & 127 == 127] = 0  # no number
        values = bits.view(dtype).view(rows, columns)
        scale = torch.logspace(-30, 30, rows * columns // 32).view(rows, -1) if rows == 16 else None
        if scale is None:
            scale = torch.rand(rows, columns // 32, generator=generator)
        tiles = to_float_tiles(values, scale)
        matrix = values.float() * scale.repeat_interleave(32, 1)
    assert tiles is not None
    return tiles, matrix


def product(x: Tensor, tiles: Tensor) -> Tensor:
    out = torch.full((len(x), 16 * len(tiles)), torch.nan)
    packed_product(x, tiles, out, num_decodes=len(x) // 2)
    return out


@DTYPES
@pytest.mark.parametrize("rows", [16, 48])
def test_tiles_and_their_rows_have_the_bits_of_the_matrix(dtype: torch.dtype, rows: int) -> None:
    tiles, matrix = random_matrix(dtype, rows, 96)
    assert torch.equal(values_of(tiles), matrix)
    numbers = torch.tensor([rows - 1, 0, 1, 15, 0])
    assert torch.equal(rows_of(tiles, numbers), matrix[numbers])
    assert rows_of(tiles, torch.tensor([rows, -1])).isnan().all()


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 29])
def test_products_are_those_of_float32(dtype: torch.dtype, rows: int) -> None:
    """Decodes and prompts, from a part of wider rows."""
    tiles, matrix = random_matrix(dtype, 80, 96)
    x = torch.randn(rows, 160, generator=torch.Generator().manual_seed(rows))[:, 64:]
    wanted = x.double() @ matrix.double().t()
    actual = product(x, tiles)
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-6
    sums = actual.clone()
    packed_product(x, tiles, sums, num_decodes=rows, add=True)
    assert torch.equal(sums, 2 * actual)


@DTYPES
def test_a_row_gets_the_same_bits_in_any_company_and_on_any_number_of_threads(
    dtype: torch.dtype,
) -> None:
    tiles, _ = random_matrix(dtype, 112, 128)
    x = torch.randn(37, 128)
    together = product(x, tiles)
    for size in (1, 2, 3, 5, 15, 32):
        assert torch.equal(product(x[:size], tiles), together[:size])
        assert torch.equal(product(x[-size:], tiles), together[-size:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(x, tiles), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.ones(24, 32).bfloat16(), id="rows"),
        pytest.param(torch.ones(16, 48).bfloat16(), id="columns"),
        pytest.param(torch.full((16, 32), torch.inf).half(), id="infinite"),
        pytest.param(torch.full((16, 32), torch.nan).to(torch.float8_e4m3fn), id="nan"),
    ],
)
def test_what_fills_no_tiles_is_none(values: Tensor) -> None:
    scale = torch.ones(len(values), 1) if values.itemsize == 1 else None
    assert to_float_tiles(values, scale) is None


def test_scales_that_float32_cannot_hold_are_none() -> None:
    """The kernel's are 256 times as large."""
    values = torch.ones(16, 32).to(torch.float8_e4m3fn)
    assert to_float_tiles(values, torch.full((16, 1), 1e37)) is None
