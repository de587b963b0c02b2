"""`python older_processor.py BITS`: the packed product as a processor without AVX-512 gets it.

Compiles the kernel for such a processor and prints its distance from the reference, relative to
the reference's norm.
"""

from __future__ import annotations

import sys

import llvmlite.binding as llvm
import torch

OLDER = "haswell"
host = llvm.get_host_cpu_features()
for feature in host:
    if any(name in feature for name in ("avx512", "vnni", "avx10", "amx")):
        host[feature] = False
llvm.get_host_cpu_features = lambda: host
llvm.get_host_cpu_name = lambda: OLDER

from diptych_kernels.native import kernel  # noqa: E402
from diptych_kernels.native.compile import compile_kernel  # noqa: E402
from diptych_kernels.packed_product import packed_product, reference, to_tiles  # noqa: E402

bits = int(sys.argv[1])
compiled = compile_kernel("packed_product", bits)
kernel.object_files = lambda _: [compiled]  # it is not to be kept
generator = torch.Generator().manual_seed(0)
levels = torch.randint(0, 1 << bits, (32, 96), generator=generator).to(torch.uint8)
scale, offset = torch.randn(2, 32, 3, generator=generator)
tiles = to_tiles(levels, scale, offset, bits)
assert tiles is not None
x = torch.randn(11, 96, generator=generator)
actual, expected = torch.empty(2, 11, 32)
packed_product(x, tiles, actual, num_decodes=3)
reference.packed_product(x, tiles, expected, num_decodes=11)
print(float((actual - expected).norm() / expected.norm()))
