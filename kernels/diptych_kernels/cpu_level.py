"""Chooses which of a processor's instructions kernels may use: one level for the whole process.

A level is a set of instructions that usually come together. So a kernel is compiled once for each
level, on any machine, and not for each model of processor.
"""

from __future__ import annotations

import ctypes
import enum
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, TypeVar

import llvmlite.binding as llvm

VARIABLE: Final = "DIPTYCH_CPU_LEVEL"
AUTO: Final = "auto"
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Constants of Linux's headers: a system call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA."""


class CpuLevel(enum.IntEnum):
    """The levels. Each includes those before it."""

    NONE = 0
    """No compiled kernel at all; torch computes everything. ARM, and x86-64 before 2013."""
    AVX2 = 1
    """x86-64-v3."""
    VNNI = 2
    """x86-64-v4, and AVX512-VNNI."""
    AMX = 3
    """The matrix unit for bfloat16."""

    @property
    def word(self) -> str:
        """The level's name in options and logs."""
        return self.name.lower()


WORDS: Final = (AUTO, *(level.word for level in CpuLevel))
NEEDED: Final = {
    CpuLevel.AVX2: {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"},
    CpuLevel.VNNI: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni"},
    CpuLevel.AMX: {"avx512bf16", "amx-tile", "amx-bf16"},
}
"""LLVM's names of the instruction sets that a level adds to the level before."""


class CpuLevelError(ValueError):
    """There is no such level, or this machine does not have it."""


Function = TypeVar("Function", bound=Callable[..., Any])
_forget: Final[list[Callable[[], None]]] = []
_chosen: CpuLevel | None = None


def remembered(function: Function) -> Function:
    """Cache a function's results until another level is in use."""
    cached = cache(function)
    forgotten(cached.cache_clear)
    return cached  # type: ignore[return-value]


def forgotten(clear: Callable[[], None]) -> None:
    """Register a cache to be cleared when another level is in use."""
    _forget.append(clear)


def forget() -> None:
    """Clear the caches that `remembered` and `forgotten` registered."""
    for clear in _forget:
        clear()


def is_x86_64(machine: str) -> bool:
    """Whether `platform.machine()` names an x86-64. Other processors have no level but NONE."""
    return machine in ("x86_64", "AMD64")


def level_of(machine: str, features: Mapping[str, bool], *, may_use_tiles: bool) -> CpuLevel:
    """Return the highest level of a processor.

    machine: as `platform.machine()` returns it. features: by LLVM's names. may_use_tiles: whether
    the operating system lets this process use the matrix unit.
    """
    level = CpuLevel.NONE
    if is_x86_64(machine):
        for higher, needed in NEEDED.items():
            if not all(features.get(name) for name in needed):
                break
            if higher is CpuLevel.AMX and not may_use_tiles:
                break
            level = higher
    return level


@cache
def machine_level() -> CpuLevel:
    """Return the highest level of this machine."""
    features = llvm.get_host_cpu_features()
    return level_of(platform.machine(), features, may_use_tiles=_may_use_tiles())


def chosen_level(word: str, name: str, has: CpuLevel) -> CpuLevel:
    """Return the level that a word names, on a machine with levels up to `has`.

    Raises `CpuLevelError`, which calls the option `name`.
    """
    if word not in WORDS:
        raise CpuLevelError(f"{name} must be {', '.join(WORDS[:-1])} or {WORDS[-1]}, not {word!r}")
    wanted = has if word == AUTO else CpuLevel[word.upper()]
    if wanted > has:
        only = "no level but none" if has is CpuLevel.NONE else f"only {has.word}"
        raise CpuLevelError(f"{name} is {word}, but this machine has {only}: leave it {AUTO}")
    return wanted


def use_level(word: str = AUTO, name: str = "cpu_level") -> CpuLevel:
    """Use this level in the whole process, and return it.

    `auto` is the level that is already in use, else the value of `$DIPTYCH_CPU_LEVEL`, else the
    machine's highest. Raises `CpuLevelError`, as `chosen_level`.
    """
    if word != AUTO:
        _use(chosen_level(word, name, machine_level()))
    elif _chosen is None:
        _use(chosen_level(os.environ.get(VARIABLE) or AUTO, VARIABLE, machine_level()))
    return cpu_level()


def cpu_level() -> CpuLevel:
    """Return the level in use. Raises `CpuLevelError` if it has to be chosen now and cannot be."""
    return use_level() if _chosen is None else _chosen


@contextmanager
def forced(level: CpuLevel) -> Iterator[None]:
    """Use another level during the block, with kernels that were disabled tried
    again; for tests."""
    before = _chosen
    _use(chosen_level(level.word, "level", machine_level()))
    try:
        yield
    finally:
        _use(before)


@cache
def machine_has_bfloat16_dots() -> bool:
    """Whether the machine multiplies pairs of bfloat16 numbers by one instruction (AVX512-BF16)."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


def _use(level: CpuLevel | None) -> None:
    global _chosen
    if level is not _chosen:
        _chosen = level
        forget()


def _may_use_tiles() -> bool:
    """Linux asks to be asked."""
    if sys.platform != "linux" or not is_x86_64(platform.machine()):
        return False
    refused = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return bool(refused == 0)
