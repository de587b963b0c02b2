"""Reads keys and values from the cache and writes them into it, as float32 or bfloat16 numbers."""

from __future__ import annotations

import numpy as np
from numba import njit

from diptych_kernels.native.compiled.primitives import FLOAT, bfloat, floats, halves_of
from diptych_kernels.native.compiled.vectors import LANES, copy_16, widen_16


@njit
def read_floats(source, target, count, item):
    """Read numbers from the cache as float32."""
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
    """Read numbers from the cache as bfloat16."""
    if item == FLOAT:
        _narrow(source, target, count)
    else:
        x, y = halves_of(source, count), halves_of(target, count)
        for i in range(count):
            y[i] = x[i]


@njit
def write(source, target, count, item):
    """Write float32 numbers into the cache."""
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
