"""The test case for the kernel for normalisation."""

from __future__ import annotations

from diptych_kernels.native.kernel import Kernel
from diptych_kernels.rms_norm import reference
from diptych_kernels.rms_norm.calls import call
from diptych_kernels.trust import KnownCase, Results, random_values, unwritten

EPS = 1e-5


def _results(kernel: Kernel) -> Results:
    x, weight, out = random_values(3, 75), random_values(75), unwritten(3, 75)
    _, arguments = call(x, weight, EPS, out)
    kernel.run(arguments, 1)
    return out, reference.rms_norm(x, weight, EPS)


CASE = KnownCase("rms_norm", _results, tolerance=1e-5)
