"""Keys and values on their way out of the cache and into it, as numbers of 4 or 2 bytes each:
float32 or bfloat16."""

from __future__ import annotations

import numpy as np
from numba import njit

from diptych_kernels.native.compiled.primitives import FLOAT, bfloat, floats, halves_of
from diptych_kernels.native.compiled.vectors import LANES, copy_16, widen_16


@njit
def read_floats(source, target, count, item):
    """Numbers from the cache as float32 ones."""
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        if item == FLOAT:
            copy_16(source + i * FLOAT, target + i * FLOAT)
        else:
            widen_16(source + i * item, target + i * FLOAT)
    x, y, z = floats(source, count), halves_of(source, count), floats(target, count)
    for i in range(whole, count):
        z[i] = x[i] if item == FLOAT else np.int32(np.int32(y[i]) << 16).view(np.float32)


@njit
def read_halves(source, target, count, item):
    """Numbers from the cache as bfloat16 ones."""
    if item == FLOAT:
        _narrow(source, target, count)
    else:
        x, y = halves_of(source, count), halves_of(target, count)
        for i in range(count):
            y[i] = x[i]


@njit
def write(source, target, count, item):
    """Float32 numbers into the cache."""
    if item == FLOAT:
        x, y = floats(source, count), floats(target, count)
        for i in range(count):
            y[i] = x[i]
    else:
        _narrow(source, target, count)


@njit
def _narrow(source, target, count):
    x, y = floats(source, count), halves_of(target, count)
    for i in range(count):
        y[i] = bfloat(x[i])
