"""Normalisation of rows for CPUs, as Numba compiles it; `rms_norm.cpu` calls it."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from diptych_kernels.native.arguments import RmsNorm, record_of
from diptych_kernels.native.compiled.primitives import (
    FAST,
    float_of,
    floats,
    num_threads,
    thread_index,
)

FLOAT = 4
"""Size in bytes."""
ARGUMENTS = record_of(RmsNorm)


def entry(number):
    """Return the one kernel for all sizes: `number` is 0."""

    def rms_norm(address):
        _rms_norm(carray(address, 1, ARGUMENTS)[0])

    return rms_norm


@njit(error_model="numpy")
def _rms_norm(given):
    """What each thread does: some of the rows."""
    rows, size, eps = given.rows, given.size, float_of(given.eps)
    thread, threads = thread_index(), num_threads()
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        source, target = given.x + row * given.x_stride, given.out + row * size * FLOAT
        norm(source, given.weight, target, size, eps)


@njit(fastmath=FAST, error_model="numpy")
def norm(source, weight, target, size, eps):
    """Normalise one row; `target` may be the row itself."""
    x, factors, y = floats(source, size), floats(weight, size), floats(target, size)
    total = np.float32(0.0)
    for i in range(size):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        y[i] = x[i] * scale * factors[i]
