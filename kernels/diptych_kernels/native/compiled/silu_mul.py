"""The gate of a SwiGLU MLP for CPUs, as Numba compiles it; `silu_mul.cpu` calls it."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from diptych_kernels.native.arguments import SiluMul, record_of
from diptych_kernels.native.compiled.primitives import FAST, exp2, floats, num_threads, thread_index

FLOAT = 4
"""Size in bytes."""
ARGUMENTS = record_of(SiluMul)
ZERO, ONE, LOG2_E = np.float32(0.0), np.float32(1.0), np.float32(math.log2(math.e))


def entry(number):
    """Return the one kernel for all sizes: `number` is 0."""

    def silu_mul(address):
        _silu_mul(carray(address, 1, ARGUMENTS)[0])

    return silu_mul


@njit(error_model="numpy")
def _silu_mul(given):
    """What each thread does: some of the rows."""
    gate_up, out, rows, size = given.gate_up, given.out, given.rows, given.size
    thread, threads = thread_index(), num_threads()
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        _gate(gate_up + 2 * row * size * FLOAT, out + row * size * FLOAT, size)


@njit(fastmath=FAST, error_model="numpy")
def _gate(gate_up, out, size):
    x, y, z = floats(gate_up, size), floats(gate_up + size * FLOAT, size), floats(out, size)
    for i in range(size):
        # 1 / (1 + e^-x), written so that the power is at most 1
        power = exp2(-abs(x[i]) * LOG2_E)
        z[i] = x[i] * (ONE if x[i] >= ZERO else power) / (ONE + power) * y[i]
