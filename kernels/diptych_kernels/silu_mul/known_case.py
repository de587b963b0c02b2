"""The test case for the kernel for the gate."""

from __future__ import annotations

from diptych_kernels.native.kernel import Kernel
from diptych_kernels.silu_mul import reference
from diptych_kernels.silu_mul.calls import call
from diptych_kernels.trust import KnownCase, Results, random_values, unwritten


def _results(kernel: Kernel) -> Results:
    x, out = random_values(3, 150), unwritten(3, 75)
    _, arguments = call(x, out)
    kernel.run(arguments, 1)
    return out, reference.silu_mul(x)


CASE = KnownCase("silu_mul", _results, tolerance=1e-5)
