"""Rotation and cache write for CPUs, after bias and norms for models that have them, as Numba
compiles them; `rope_kv_write.cpu` calls it.

Every length is in elements, every stride in bytes.
"""

from __future__ import annotations

from numba import carray, njit

from diptych_kernels.native.arguments import RopeKvWrite, record_of
from diptych_kernels.native.compiled.cache_rows import write
from diptych_kernels.native.compiled.primitives import (
    float_of,
    floats,
    ints,
    num_threads,
    thread_index,
)
from diptych_kernels.native.compiled.rms_norm import norm

FLOAT = 4
"""Size in bytes."""
ARGUMENTS = record_of(RopeKvWrite)


def entry(number):
    """Return the one kernel for all sizes: `number` is 0."""

    def rope_kv_write(address):
        _rope_kv_write(carray(address, 1, ARGUMENTS)[0])

    return rope_kv_write


@njit(error_model="numpy")
def _rope_kv_write(given):
    """What each thread does: some of the tokens. A weight that the model has not is at 0."""
    tokens, num_heads, kv_heads, dim = given.tokens, given.num_heads, given.kv_heads, given.head_dim
    bias, query_norm, key_norm, eps = given.bias, given.query_norm, given.key_norm, given.eps
    block_of, offset_of = ints(given.blocks, tokens), ints(given.offsets, tokens)
    head_size = dim * FLOAT
    thread, threads = thread_index(), num_threads()
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        rotation = given.rotations + token * head_size
        source = given.heads + token * num_heads * head_size
        keys = source + (num_heads - 2 * kv_heads) * head_size
        values = keys + kv_heads * head_size
        if bias != 0:
            _add(source, bias, num_heads * dim)
        for head in range(source, values, head_size):
            weight = query_norm if head < keys else key_norm
            if weight != 0:
                norm(head, weight, head, dim, float_of(eps))
            _rotate(head, rotation, dim)
        token_size = kv_heads * dim * given.item
        target = given.cache + block_of[token] * given.block_stride
        target += offset_of[token] * token_size
        write(keys, target, kv_heads * dim, given.item)
        write(values, target + given.block_size * token_size, kv_heads * dim, given.item)


@njit
def _add(row, bias, size):
    """row += bias."""
    x, y = floats(row, size), floats(bias, size)
    for i in range(size):
        x[i] += y[i]


@njit
def _rotate(head, rotation, dim):
    """head *= rotation, pairs being complex numbers."""
    x, factors = floats(head, dim), floats(rotation, dim)
    for i in range(0, dim, 2):
        real, imaginary, cos, sin = x[i], x[i + 1], factors[i], factors[i + 1]
        x[i] = real * cos - imaginary * sin
        x[i + 1] = real * sin + imaginary * cos
