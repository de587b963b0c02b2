"""The basis of kernels for CPUs: access to memory at an address, and the threads that run them."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered, because otherwise no loop would use vectors. NaN and infinity keep their
meaning."""
FLOAT, CACHE_LINE = 4, 64
"""Sizes in bytes."""
E1, E2, E3, E4, E5, E6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))
"""2^x = 1 + E1 x + E2 x^2 + ..., as exact as float32 can be for |x| <= 1/2."""
INFINITY, ANY_NAN = np.int32(0x7F800000), np.int32(0x7FC0)
"""Bits of a float32, and of a bfloat16."""
ONE, HALF, LOWEST = np.float32(1.0), np.float32(0.5), np.float32(-126.0)

_BYTES = ir.PointerType(ir.IntType(8))
_INT32 = ir.IntType(32)

thread_index = types.ExternalFunction("omp_get_thread_num", types.int32())
num_threads = types.ExternalFunction("omp_get_num_threads", types.int32())
await_others = types.ExternalFunction("await_others", types.void())
"""Return when every thread that runs the kernel has called this."""


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(address), generate


@intrinsic
def _prefetch_line(typing_context, address):
    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        to_read, to_keep, data = _INT32(0), _INT32(3), _INT32(1)
        line = builder.inttoptr(arguments[0], _BYTES)
        builder.call(prefetch, [line, to_read, to_keep, data])
        return context.get_dummy_value()

    return types.void(address), generate


@njit
def floats(address, count):
    """Return `count` float32 numbers at an address as an array."""
    return carray(_pointer(address), count, np.float32)


@njit
def ints(address, count):
    """Return `count` int64 numbers at an address as an array."""
    return carray(_pointer(address), count, np.int64)


@njit
def small_ints(address, count):
    """Return `count` int8 numbers at an address as an array."""
    return carray(_pointer(address), count, np.int8)


@njit
def halves_of(address, count):
    """Return `count` int16 numbers at an address as an array."""
    return carray(_pointer(address), count, np.int16)


@njit
def words_of(address, count):
    """Return `count` int32 numbers at an address as an array."""
    return carray(_pointer(address), count, np.int32)


@njit
def prefetch(address, num_bytes):
    """Ask for memory that will be read soon."""
    for offset in range(0, num_bytes, CACHE_LINE):
        _prefetch_line(address + offset)


@njit(fastmath=FAST)
def exp2(x):
    """2^x for x <= 0; NaN stays NaN."""
    x = LOWEST if x < LOWEST else x
    whole = np.int32(x - HALF)
    rest = x - np.float32(whole)
    power = ONE + rest * (E1 + rest * (E2 + rest * (E3 + rest * (E4 + rest * (E5 + rest * E6)))))
    return power * np.int32((whole + 127) << 23).view(np.float32)


@njit
def bfloat(x):
    """Return the bits of the bfloat16 nearest to a float32, ties to even; NaN stays NaN."""
    bits = np.float32(x).view(np.int32)
    nearest = (bits + np.int32(0x7FFF) + ((bits >> 16) & np.int32(1))) >> 16
    is_nan = (bits & np.int32(0x7FFFFFFF)) > INFINITY
    return np.int16(ANY_NAN if is_nan else nearest)


@njit
def float_of(bits):
    """Return the float32 whose bits a number has."""
    return np.int32(bits).view(np.float32)
