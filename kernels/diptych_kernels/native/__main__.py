"""`python -m diptych_kernels.native`: every kernel for this processor, beside its source.

For images and other installations that nobody can write to: there, an engine would compile what
it needs, for some seconds, each time that it starts.
"""

from __future__ import annotations

from diptych_kernels.call_table import WIDTH
from diptych_kernels.matrix_unit import has_matrix_unit
from diptych_kernels.native.kernel import object_file
from diptych_kernels.paged_attention.cpu import COMMON_DIMS

for head_dim in (0, *sorted(COMMON_DIMS)):
    object_file("decode_attention", head_dim)
for head_dim in sorted(COMMON_DIMS):
    object_file("prefill_attention", head_dim)
    if has_matrix_unit():
        object_file("amx_attention", head_dim)
for name in ("rms_norm", "rope_kv_write", "silu_mul"):
    object_file(name, 0)
object_file("run_calls", WIDTH)
for bits in (4, 8):
    object_file("packed_product", bits)
    if has_matrix_unit():
        object_file("amx_product", bits)
