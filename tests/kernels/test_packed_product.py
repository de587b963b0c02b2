"""The packed product on a CPU: against its reference, and what does not change a row's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diptych_kernels.cpu_level import CpuLevel
from diptych_kernels.native.tile_layout import BYTE, LEVEL_BITS, SPANS, WORD_BITS
from diptych_kernels.packed_product import (
    cpu,
    kind_for,
    packed_product,
    reference,
    rows_of,
    to_tiles,
)
from diptych_kernels.packed_product.reference import values_of

pytestmark = pytest.mark.usefixtures("compiled_level")
BITS = pytest.mark.parametrize("bits", LEVEL_BITS)


def random_tiles(rows: int, columns: int, bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(bits)
    levels = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    scale, offset = torch.randn(2, rows, columns // SPANS[bits], generator=generator)
    tiles = to_tiles(levels.to(torch.uint8), scale, offset * (1 << bits), bits)
    assert tiles is not None
    return tiles


def product(x: Tensor, tiles: Tensor, num_decodes: int, input_bits: int = WORD_BITS) -> Tensor:
    out = torch.full((len(x), 16 * len(tiles)), torch.nan)
    packed_product(x, tiles, out, num_decodes=num_decodes, input_bits=input_bits)
    return out


@pytest.fixture(params=[WORD_BITS, BYTE])
def input_bits(request: pytest.FixtureRequest, compiled_level: CpuLevel) -> int:
    bits: int = request.param
    if bits == BYTE and compiled_level < CpuLevel.VNNI:
        pytest.skip("no instruction of this level multiplies bytes")
    assert bits == WORD_BITS or cpu.rounds_to_bytes()
    return bits


@pytest.mark.parametrize(
    ("bits", "span"), [(bits, span) for bits in LEVEL_BITS for span in (16, 32)]
)
def test_tiles_hold_the_matrix(bits: int, span: int) -> None:
    """In the smallest of the tiles that hold such levels and spans, if there are any."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(0, 1 << bits, (48, 96), generator=generator).to(torch.uint8)
    scale, offset = torch.randn(2, 48, 96 // span, generator=generator).half().float()
    kind = kind_for(bits, span)
    assert (kind is None) == ((bits, span) == (8, 16))
    if kind is not None:
        tiles = to_tiles(levels, scale, offset, kind)
        assert tiles is not None
        wanted = levels.view(48, -1, span) * scale[..., None] + offset[..., None]
        assert torch.equal(values_of(tiles), wanted.view(48, 96))


@BITS
@pytest.mark.parametrize("step", [1, 3])
def test_rows_have_the_bits_of_the_matrix(bits: int, step: int) -> None:
    """With factors from the smallest float16 to the largest; a row that is not there is NaN."""
    scale = torch.tensor([[6e-8, -6e-8, 5e-5], [65504.0, -1.0, 0.0]]).repeat(24, 1)
    levels = torch.arange(48 * 96).view(48, 96).remainder(1 << bits).to(torch.uint8)
    tiles = to_tiles(levels, scale, scale.flip(1), bits)
    assert tiles is not None
    numbers = torch.tensor([47, 0, 1, 16, 31, 31, 32])[::step]
    assert torch.equal(rows_of(tiles, numbers), values_of(tiles)[numbers])
    assert rows_of(tiles, torch.tensor([48, -1])).isnan().all()


@pytest.mark.parametrize(
    ("shape", "scale"), [((24, 32), 1.0), ((16, 32), 1e5), ((16, 32), torch.nan)]
)
def test_what_fills_no_tiles_is_none(shape: tuple[int, int], scale: float) -> None:
    scales = torch.full((shape[0], shape[1] // 32), scale)
    assert to_tiles(torch.zeros(shape, dtype=torch.uint8), scales, scales, 4) is None


@BITS
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 71])
@pytest.mark.parametrize("columns", [64, 80])
def test_decodes_are_computed_as_the_reference_does(
    bits: int, rows: int, columns: int, input_bits: int
) -> None:
    """Rows of every size of block; inputs that are a part of wider rows, and groups of zeros."""
    tiles = random_tiles(columns, 96, bits)
    wide = torch.randn(rows, 160, generator=torch.Generator().manual_seed(rows))
    wide[:, 64:96] = 0
    x = wide[:, 64:]
    wanted = torch.empty(rows, columns)
    reference.packed_product(x, tiles, wanted, num_decodes=rows, input_bits=input_bits)
    # At the middle between two levels either may be taken.
    step = 2.0 ** (WORD_BITS - input_bits)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3 * (1 << bits) * step}
    torch.testing.assert_close(product(x, tiles, rows, input_bits), wanted, **near)


@BITS
@pytest.mark.parametrize(("num_decodes", "rows"), [(0, 1), (0, 16), (3, 20), (1, 33), (5, 64)])
@pytest.mark.parametrize("columns", [64, 80])
def test_chunks_are_computed_as_the_reference_does(
    bits: int, num_decodes: int, rows: int, columns: int
) -> None:
    """Beside decodes or without; by the matrix unit where there is one."""
    tiles = random_tiles(columns, 96, bits)
    wide = torch.randn(rows, 160, generator=torch.Generator().manual_seed(rows))
    wanted = torch.empty(rows, columns)
    in_integers = cpu.integer_rows(num_decodes, rows)
    reference.packed_product(wide[:, 64:], tiles, wanted, num_decodes=in_integers)
    actual = product(wide[:, 64:], tiles, num_decodes)
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-3
    decodes = product(wide[:num_decodes, 64:], tiles, num_decodes)
    assert torch.equal(actual[:num_decodes], decodes)


@pytest.mark.parametrize("num_decodes", [0, 2, 5])
def test_it_can_add_to_what_is_there(num_decodes: int) -> None:
    tiles = random_tiles(32, 64, 4)
    x, sums = torch.randn(5, 64), torch.randn(5, 48)[:, :32]
    added = sums.clone()
    packed_product(x, tiles, added, num_decodes=num_decodes, add=True)
    torch.testing.assert_close(added, sums + product(x, tiles, num_decodes), rtol=1e-5, atol=1e-4)


@BITS
@pytest.mark.parametrize("are_decodes", [True, False])
def test_a_row_gets_the_same_bits_in_any_company_and_on_any_number_of_threads(
    bits: int, are_decodes: bool, input_bits: int
) -> None:
    tiles = random_tiles(112, 128, bits)
    x = torch.randn(67, 128)

    def own_product(x: Tensor) -> Tensor:
        return product(x, tiles, len(x) if are_decodes else 0, input_bits)

    together = own_product(x)
    for size in (1, 2, 6, 15, 16, 33):
        assert torch.equal(own_product(x[:size]), together[:size])
        assert torch.equal(own_product(x[-size:]), together[-size:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(own_product(x), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_decodes", [0, 3])
def test_what_is_not_finite_shows_in_its_own_row_alone(
    bad: float, num_decodes: int, input_bits: int
) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = bad
    out = product(x, random_tiles(32, 64, 4), num_decodes, input_bits)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()
