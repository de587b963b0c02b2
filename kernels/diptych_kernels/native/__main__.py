"""`python -m diptych_kernels.native`: every kernel for this processor, beside its source.

For images and other installations that nobody can write to: there, an engine would compile what
it needs, for some seconds, each time that it starts. And for tests, whose first engines would all
compile at once.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from diptych_kernels.call_table import WIDTH
from diptych_kernels.cpu_features import has_bfloat16_dots, has_matrix_unit
from diptych_kernels.native.object_files import object_files
from diptych_kernels.paged_attention.cpu import COMMON_DIMS

DIMS, BITS = sorted(COMMON_DIMS), (4, 8)
kernels = [
    *(("decode_attention", head_dim) for head_dim in (0, *DIMS)),
    *(("prefill_attention", head_dim) for head_dim in DIMS),
    *((name, 0) for name in ("rms_norm", "rope_kv_write", "silu_mul")),
    ("run_calls", WIDTH),
    *(("packed_product", bits) for bits in BITS),
]
if has_bfloat16_dots():
    kernels += [("bf16_decode_attention", head_dim) for head_dim in (0, *DIMS)]
if has_matrix_unit():
    kernels += [("amx_attention", head_dim) for head_dim in DIMS]
    kernels += [("amx_product", bits) for bits in BITS]
names = [f"{module}-{number}" for module, number in kernels]
processes = os.cpu_count() or 1
with ThreadPoolExecutor(processes) as pool:
    list(pool.map(object_files, [names[first::processes] for first in range(processes)]))
