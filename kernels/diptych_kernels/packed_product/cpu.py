"""The packed product: rounds its input, then computes 16 or 32 columns at a time for all rows.

Decodes are summed up in integers. Chunks of prompts, which are bound by arithmetic, are computed in
bfloat16 by the processor's matrix unit, if it has one: it is four times as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych_kernels.cpu_level import remembered
from diptych_kernels.native.tile_layout import LEVEL_BITS
from diptych_kernels.packed_product.calls import chunk_call, decode_call, workspace_bytes
from diptych_kernels.packed_product.known_cases import AMX_PRODUCT, PACKED_PRODUCT
from diptych_kernels.trust import is_trusted


@remembered
def is_available() -> bool:
    """Whether the level in use has the packed product, and all of its kernels are trusted."""
    return all(is_trusted(PACKED_PRODUCT, bits) for bits in LEVEL_BITS)


@remembered
def has_matrix_unit() -> bool:
    """Whether chunks of prompts are computed by the matrix unit."""
    return all(is_trusted(AMX_PRODUCT, bits) for bits in LEVEL_BITS)


def integer_rows(num_decodes: int, rows: int) -> int:
    """Return how many of `rows` rows, of which `num_decodes` are decodes, are summed up in
    integers."""
    return num_decodes if has_matrix_unit() else rows


def packed_product(
    x: Tensor, tiles: Tensor, out: Tensor, *, num_decodes: int, add: bool = False
) -> None:
    """As `diptych_kernels.packed_product.packed_product`."""
    rows, columns = x.shape
    workspace = torch.empty(workspace_bytes(rows, columns), dtype=torch.int8)
    in_integers = integer_rows(num_decodes, rows)
    if in_integers:
        own, numbers = decode_call(x[:in_integers], tiles, out, workspace, add=add)
        own.run(numbers, torch.get_num_threads())
    if in_integers < rows:
        own, numbers = chunk_call(x, in_integers, tiles, out, workspace, add=add)
        own.run(numbers, torch.get_num_threads())
