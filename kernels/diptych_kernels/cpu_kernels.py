"""All kernels for CPUs: their test cases, and which of them are compiled in advance."""

from __future__ import annotations

from typing import Final

from diptych_kernels import call_table
from diptych_kernels.call_table import WIDTH
from diptych_kernels.native.tile_layout import FLOAT_KINDS, LEVEL_BITS
from diptych_kernels.packed_product import cpu as packed_product
from diptych_kernels.paged_attention import cpu as paged_attention
from diptych_kernels.paged_attention.cpu import COMMON_DIMS
from diptych_kernels.rms_norm import cpu as rms_norm
from diptych_kernels.rope_kv_write import cpu as rope_kv_write
from diptych_kernels.silu_mul import cpu as silu_mul

_DIMS: Final = tuple(sorted(COMMON_DIMS))
_COMPILED: Final = {
    rms_norm.CASE: (0,),
    rope_kv_write.CASE: (0,),
    silu_mul.CASE: (0,),
    call_table.CASE: (WIDTH,),
    packed_product.PACKED_PRODUCT: LEVEL_BITS,
    packed_product.BYTE_PRODUCT: LEVEL_BITS,
    packed_product.PACKED_ROWS: LEVEL_BITS,
    packed_product.AMX_PRODUCT: LEVEL_BITS,
    packed_product.FLOAT_PRODUCT: FLOAT_KINDS,
    packed_product.FLOAT_ROWS: FLOAT_KINDS,
    paged_attention.DECODES: (0, *_DIMS),
    paged_attention.BF16_DECODES: (0, *_DIMS),
    paged_attention.CHUNK: _DIMS,
    paged_attention.BF16_CHUNK: _DIMS,
    paged_attention.AMX_CHUNK: _DIMS,
}
"""The numbers that each kernel is compiled for before any engine starts."""
CASES: Final = {case.name: case for case in _COMPILED}
"""By the kernels' names."""
KERNELS: Final = [(case.name, number) for case, numbers in _COMPILED.items() for number in numbers]
"""Names and numbers of the kernels that are compiled before any engine starts."""
