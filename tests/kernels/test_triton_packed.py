"""Products with packed matrices on a GPU, beside products with the floats that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych_kernels.native.tile_layout import GROUP, LEVEL_BITS, SPANS
from diptych_kernels.packed_product import triton as packed
from diptych_kernels.packed_product.gpu_tiles import FLOAT8, to_gpu_float_tiles, to_gpu_tiles

KINDS = (*LEVEL_BITS, FLOAT8)
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2}
OUTPUTS, COLUMNS = 76, 320
"""Neither fills a program, nor the last block."""


def matrix(kind: int | torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tiles, and [outputs, columns] float32: each level, and 8-bit floats with small ones."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(kind, torch.dtype):
        sizes = torch.logspace(-3, 1, COLUMNS)
        floats = torch.randn(OUTPUTS, COLUMNS, generator=generator).mul_(sizes).to(kind)
        scale = torch.rand(OUTPUTS, COLUMNS // GROUP, generator=generator)
        values = floats.float().view(*scale.shape, GROUP) * scale[..., None]
        tiles = to_gpu_float_tiles(floats.to(device), scale.to(device))
        assert tiles is not None
        return tiles, values.view(OUTPUTS, COLUMNS).to(device)
    levels = torch.arange(OUTPUTS * COLUMNS).view(OUTPUTS, COLUMNS).remainder(1 << kind)
    scale, offset = torch.randn(2, OUTPUTS, COLUMNS // SPANS[kind], generator=generator)
    scale, offset = scale.half().float(), (offset * (1 << kind)).half().float()
    values = levels.view(*scale.shape, SPANS[kind]) * scale[..., None] + offset[..., None]
    own = levels.to(device, torch.uint8), scale.to(device), offset.to(device)
    made = to_gpu_tiles(*own, kind)
    assert made is not None
    return made, values.view(OUTPUTS, COLUMNS).to(device)


@OF_EACH_KIND
def test_rows_are_those_of_the_matrix(kind: int | torch.dtype, device: torch.device) -> None:
    """Wherever they are put; a row that is not there is NaN."""
    tiles, values = matrix(kind, device)
    numbers = torch.tensor([75, 0, 1, 31, 31, 32], device=device)
    out = torch.empty(6, COLUMNS + 8, device=device)[:, :COLUMNS]
    packed.unpack_rows(tiles, out, numbers)
    largest = float(values.abs().max())
    # An offset may lose 2 ** -12 of a scale.
    torch.testing.assert_close(out, values[numbers], rtol=1e-6, atol=3e-5 * largest)
    packed.unpack_rows(tiles, out[:2], torch.tensor([76, -1], device=device))
    assert out[:2].isnan().all()


@pytest.mark.one_in(3, "kind", "rows")
@OF_EACH_KIND
@pytest.mark.parametrize(
    ("rows", "programs"), [(1, 1), (1, 8), (3, 8), (19, 1), (packed.FEW_ROWS + 6, 1)]
)
def test_products_are_those_with_the_matrix_in_floats(
    kind: int | torch.dtype,
    rows: int,
    programs: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, and added to what is there; of a part of wider rows; their sums whole or split."""
    # Triton's interpreter multiplies matrices of bfloat16 wrongly.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for name in ("ONE_ROW", "SOME_ROWS", "MORE_ROWS"):
        divided = getattr(packed, name)._replace(outputs=64, programs=programs)
        monkeypatch.setattr(packed, name, divided)
    monkeypatch.setattr(packed, "UNPACKED_BYTES", 40 * COLUMNS * dtype.itemsize)
    tiles, values = matrix(kind, device)
    values = values.to(dtype).float()
    wide = torch.randn(rows, COLUMNS + 64, generator=torch.Generator().manual_seed(2))
    x = wide.to(device, dtype)[:, 32:-32]
    wanted = x.float() @ values.t()
    largest = float(wanted.abs().max())
    out = torch.empty(rows, OUTPUTS, dtype=dtype, device=device)
    for add in (False, True):
        packed.packed_product(x, tiles, out, add=add)
        near = TOLERANCE[dtype] * largest * (1 + add)
        torch.testing.assert_close(out.float(), wanted * (1 + add), rtol=0, atol=near)


def test_what_tiles_cannot_hold_is_none() -> None:
    large = torch.full((16, 1), 7e4)
    assert to_gpu_tiles(torch.zeros(16, 32, dtype=torch.uint8), large, large, 4) is None
    assert to_gpu_float_tiles(torch.full((16, 32), torch.nan).to(FLOAT8), large) is None
