"""Rotation and cache write for CPUs, as Numba compiles them; `rope_kv_write.cpu` calls it.

Every length is in elements, every stride in bytes.
"""

from __future__ import annotations

from numba import carray, njit

from diptych_kernels.native.primitives import floats, ints, num_threads, thread_index

FLOAT = 4
"""Bytes."""
NUM_NUMBERS = 11


def entry(number):
    """One kernel for all sizes: `number` is 0."""

    def rope_kv_write(numbers):
        _rope_kv_write(carray(numbers, NUM_NUMBERS))

    return rope_kv_write


@njit(error_model="numpy")
def _rope_kv_write(numbers):
    """What each thread does: some of the tokens."""
    heads, rotations, cache, blocks, offsets = numbers[:5]
    tokens, num_heads, kv_heads, dim, block_size, block_stride = numbers[5:NUM_NUMBERS]
    block_of, offset_of = ints(blocks, tokens), ints(offsets, tokens)
    head_size = dim * FLOAT
    thread, threads = thread_index(), num_threads()
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        rotation = rotations + token * head_size
        source = heads + token * num_heads * head_size
        for _ in range(num_heads - 2 * kv_heads):
            _rotate(source, rotation, source, dim)
            source += head_size
        slot = offset_of[token] * kv_heads * head_size
        target = cache + block_of[token] * block_stride + slot
        for _ in range(kv_heads):
            _rotate(source, rotation, target, dim)
            source += head_size
            target += head_size
        values = target + (block_size - 1) * kv_heads * head_size
        _copy(source, values, kv_heads * dim)


@njit
def _rotate(source, rotation, target, dim):
    """target = source rotation, pairs being complex numbers."""
    x, factors, y = floats(source, dim), floats(rotation, dim), floats(target, dim)
    for i in range(0, dim, 2):
        real, imaginary, cos, sin = x[i], x[i + 1], factors[i], factors[i + 1]
        y[i] = real * cos - imaginary * sin
        y[i + 1] = real * sin + imaginary * cos


@njit
def _copy(source, target, count):
    x, y = floats(source, count), floats(target, count)
    for i in range(count):
        y[i] = x[i]
