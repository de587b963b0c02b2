"""What this process may use of the processor."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

import llvmlite.binding as llvm

WANTED = ("amx-tile", "amx-bf16", "avx512f")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""From Linux's headers: a system call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA."""


@cache
def has_bfloat16_dots() -> bool:
    """Whether an instruction multiplies pairs of bfloat16 numbers (AVX512-BF16)."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


@cache
def has_matrix_unit() -> bool:
    """Whether there is a matrix unit (AMX), and Linux lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = llvm.get_host_cpu_features()
    if not all(features.get(name) for name in WANTED):
        return False
    refused = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return bool(refused == 0)
